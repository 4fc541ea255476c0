"""Prompts for serving: a conversation as token ids, through the chat template of the checkpoint folder."""

import json
import pathlib
from collections.abc import Sequence

import jinja2

from north_jax.chat.format import ChatFormat
from north_jax.chat.template import chat_template, render_template
from north_jax.chat.tokenizer import MARKERS, Tokenizer


class PromptFormat:
    """Renders prompts as the folder `tokenizer.path` says: by its chat_template.jinja, by ours where it has none.

    Whatever the template, content that spells a marker stays content.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        file = pathlib.Path(tokenizer.path) / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.is_file() else chat_template()
        self._template = None if text == chat_template() else text
        self._formats = {reasoning: ChatFormat(tokenizer, reasoning=reasoning) for reasoning in (True, False)}

    def prompt(self, messages: Sequence[dict], tools: Sequence[dict] = (), *, reasoning: bool = True) -> list[int]:
        """The conversation with a generation prompt behind it. Messages and tools as `ChatFormat.render`.

        Raises:
          ValueError: as `ChatFormat.render`, or what the folder's own template refuses.
        """
        # Also where the folder has a template of its own: what we cannot render we could not parse either.
        ids = self._formats[reasoning].render(messages, tools, generation_prompt=True).ids
        if self._template is None:
            return ids
        gap = _unused_character(messages, tools)
        effort = {} if reasoning else {"reasoning_effort": "none"}
        try:
            text = render_template(
                _marked(_plain(messages), gap),
                _marked(list(tools), gap),
                generation_prompt=True,
                template=self._template,
                reasoning=reasoning,
                **effort,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the checkpoint's chat template cannot render the conversation: {error}") from error
        return self.tokenizer.encode_marked(text, gap)

    def forced_call(self, messages: Sequence[dict], name: str | None, *, reasoning: bool = True) -> list[int]:
        """Ids that, behind the prompt, begin a call of the tool `name` (None: of any), without reasoning before it."""
        t = self.tokenizer
        count = sum(len(message.get("tool_calls") or ()) for message in messages)
        text = f'[\n    {{"tool_call_id": "{count}", "tool_name": "'
        if name is not None:
            text += json.dumps(name, ensure_ascii=False)[1:] + ', "parameters": {'
        return [*([t.end_thinking] if reasoning else ()), t.start_action, *t.encode(text)]


def _plain(messages: Sequence[dict]) -> list[dict]:
    """The messages as templates of this family read them: reasoning under both names, arguments as objects."""
    plain = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "weight"}
        if thinking := message.get("thinking") or message.get("reasoning_content") or message.get("reasoning"):
            message |= {"thinking": thinking, "reasoning_content": thinking}
        if message.get("tool_calls"):
            message["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        plain.append(message)
    return plain


def _plain_call(call: dict) -> dict:
    function = call.get("function", call)
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _unused_character(*values) -> str:
    text = json.dumps(values, ensure_ascii=False)
    return next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)


def _marked(value, gap: str):
    """The value with `gap` inside every marker that its strings spell, so that the template's own can be told apart."""
    if isinstance(value, str):
        for marker in MARKERS.values():
            value = value.replace(marker, marker[0] + gap + marker[1:])
        return value
    if isinstance(value, dict):
        return {_marked(key, gap): _marked(each, gap) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, gap) for each in value]
    return value
