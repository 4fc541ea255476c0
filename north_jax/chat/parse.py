"""What the model wrote, read back: token ids of one completion -> reasoning and text or tool calls, or a named error.

The grammar, after a generation prompt that ends in <|START_THINKING|>:

    reasoning <|END_THINKING|>
    ( <|START_TEXT|> text <|END_TEXT|> | <|START_ACTION|> calls <|END_ACTION|> )
    <|END_OF_TURN_TOKEN|>

Markers are told from content by their id alone; content that spells a marker is content. `calls` is a non-empty JSON
array of objects with exactly the keys tool_call_id (a string; its value is not used, ids are renumbered when the call
is rendered), tool_name (a non-empty string) and parameters (an object). Refused on purpose, though seen in the wild: a
single object instead of an array, `\\|` and other escapes that JSON does not have, misspelt or doubled keys, NaN and
Infinity, numbers too large for a float, lone surrogates, a second block after the first.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

from north_jax.chat.tokenizer import Tokenizer

# Every `ParseError.code`, with what it means.
PARSE_ERRORS = {
    "empty": "nothing was written after the reasoning, or the array of tool calls is empty",
    "unclosed_thinking": "the reasoning does not end in <|END_THINKING|>",
    "unclosed_text": "the text does not end in <|END_TEXT|>",
    "unclosed_action": "the tool calls do not end in <|END_ACTION|>",
    "no_end_of_turn": "the ids stop before <|END_OF_TURN_TOKEN|>: truncated",
    "text_and_action": "the turn holds both text and tool calls",
    "unexpected_marker": "a marker stands where the grammar has none",
    "unexpected_content": "content stands outside a block",
    "trailing_tokens": "tokens follow <|END_OF_TURN_TOKEN|>",
    "unknown_id": "an id is outside the vocabulary",
    "invalid_utf8": "the bytes of a block are not UTF-8",
    "invalid_json": "the tool calls are not JSON",
    "not_a_list": "the tool calls are JSON but not an array",
    "not_an_object": "an entry of the array is not an object",
    "missing_key": "a tool call lacks a key",
    "unknown_key": "a tool call has a key that it should not have",
    "wrong_type": "tool_call_id is not a string, or tool_name is not a non-empty string",
    "arguments_not_object": "the parameters of a tool call are not an object",
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One tool call: the tool's name and its arguments (a JSON object)."""

    name: str
    arguments: dict


@dataclasses.dataclass(frozen=True)
class Completion:
    """One assistant turn: the reasoning, then text or tool calls (text is None exactly when there are calls)."""

    reasoning: str
    text: str | None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict:
        """The turn as a message for `ChatFormat.render`."""
        if self.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            return {"role": "assistant", "thinking": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", "thinking": self.reasoning, "content": self.text}


class ParseError(ValueError):
    """A completion outside the grammar. `code`: one of `PARSE_ERRORS`; the message says it in a sentence."""

    def __init__(self, code: str, detail: str = ""):
        self.code = code
        super().__init__(f"{PARSE_ERRORS[code]}{f' ({detail})' if detail else ''}.")


def parse_completion(tokenizer: Tokenizer, ids: Sequence[int], *, reasoning: bool = True) -> Completion:
    """Reads the ids sampled after a generation prompt, <|END_OF_TURN_TOKEN|> included.

    `reasoning=False`: the prompt closed the reasoning already, so the ids begin with the text or action block.

    Raises:
      ParseError: the completion is outside the grammar (`code` says how). Nothing else, whatever the ids.
    """
    for id_ in ids:
        if not 0 <= id_ < tokenizer.vocab_size:
            raise ParseError("unknown_id", f"{id_} of a vocabulary of {tokenizer.vocab_size}")
    reader = _Reader(tokenizer, ids)
    if not len(ids):
        raise ParseError("empty", "no ids at all")
    thought = reader.until(tokenizer.end_thinking, "unclosed_thinking") if reasoning else ""

    opening = reader.marker(reader.next())
    if opening == tokenizer.end_of_turn:
        raise ParseError("empty", "the turn ends after the reasoning")
    if opening == tokenizer.start_text:
        text, calls = reader.until(tokenizer.end_text, "unclosed_text"), ()
    elif opening == tokenizer.start_action:
        text, calls = None, _calls(reader.until(tokenizer.end_action, "unclosed_action"))
    else:
        raise ParseError("unexpected_marker", f"{tokenizer.marker_names[opening]} after the reasoning")

    closing = reader.marker(reader.next())
    if {opening, closing} == {tokenizer.start_text, tokenizer.start_action}:
        raise ParseError("text_and_action")
    if closing != tokenizer.end_of_turn:
        raise ParseError("unexpected_marker", f"{tokenizer.marker_names[closing]} instead of the end of the turn")
    if reader.position < len(ids):
        raise ParseError("trailing_tokens", f"{len(ids) - reader.position} of them")
    return Completion(thought, text, calls)


class _Reader:
    """A position in the ids."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = ids
        self.position = 0

    def next(self) -> int:
        if self.position == len(self.ids):
            raise ParseError("no_end_of_turn")
        self.position += 1
        return self.ids[self.position - 1]

    def marker(self, id_: int) -> int:
        if id_ not in self.tokenizer.marker_names:
            raise ParseError("unexpected_content", f"at token {self.position - 1}")
        return id_

    def until(self, end: int, unclosed: str) -> str:
        """The content up to the marker `end`, which is consumed."""
        start = self.position
        names = self.tokenizer.marker_names
        while self.position < len(self.ids) and self.ids[self.position] not in names:
            self.position += 1
        if self.position == len(self.ids):
            raise ParseError(unclosed, "truncated")
        found = self.ids[self.position]
        if found == self.tokenizer.end_of_turn:
            raise ParseError(unclosed, "the turn ends first")
        if found != end:
            raise ParseError("unexpected_marker", f"{names[found]} inside the block that {names[end]} closes")
        self.position += 1
        try:
            return self.tokenizer.decode_bytes(self.ids[start : self.position - 1]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParseError("invalid_utf8", f"the block closed by {names[end]}, byte {error.start}") from error


def _calls(text: str) -> tuple[ToolCall, ...]:
    try:
        entries = json.loads(
            text, object_pairs_hook=_no_doubled_key, parse_constant=_no_constant, parse_float=_finite_float
        )
        # A lone surrogate (\ud800) is JSON, but no text that a file, a command or a tokenizer could take.
        json.dumps(entries, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ParseError("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise ParseError("invalid_json", str(error).rstrip(".")) from error
    if not isinstance(entries, list):
        raise ParseError("not_a_list")
    if not entries:
        raise ParseError("empty", "no tool call between <|START_ACTION|> and <|END_ACTION|>")
    return tuple(_call(entry) for entry in entries)


def _call(entry) -> ToolCall:
    if not isinstance(entry, dict):
        raise ParseError("not_an_object")
    keys = ("tool_call_id", "tool_name", "parameters")
    for key in entry:
        if key not in keys:
            raise ParseError("unknown_key", repr(key))
    for key in keys:
        if key not in entry:
            raise ParseError("missing_key", key)
    if not isinstance(entry["tool_call_id"], str) or not isinstance(entry["tool_name"], str) or not entry["tool_name"]:
        raise ParseError("wrong_type")
    if not isinstance(entry["parameters"], dict):
        raise ParseError("arguments_not_object")
    return ToolCall(entry["tool_name"], entry["parameters"])


def _no_doubled_key(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value
