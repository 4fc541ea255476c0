"""The prompt format: conversations to token ids and back, the tool-call grammar, the tokenizer."""

from north_jax.chat.format import FORMAT_PHRASES, PLATFORM, ChatFormat, Rendered, tool_phrases
from north_jax.chat.parse import PARSE_ERRORS, Completion, ParseError, ToolCall
from north_jax.chat.prompt import PromptFormat
from north_jax.chat.stream import Piece, StreamReader
from north_jax.chat.template import chat_template, render_template
from north_jax.chat.tokenizer import MARKERS, Tokenizer, train_tokenizer

__all__ = [
    "FORMAT_PHRASES",
    "MARKERS",
    "PARSE_ERRORS",
    "PLATFORM",
    "ChatFormat",
    "Completion",
    "ParseError",
    "Piece",
    "PromptFormat",
    "Rendered",
    "StreamReader",
    "Tokenizer",
    "ToolCall",
    "chat_template",
    "render_template",
    "tool_phrases",
    "train_tokenizer",
]
