"""The prompt format: a conversation to token ids (with loss weights) and back, token in, token out.

Messages are dicts:

    {"role": "system" | "user", "content": str}
    {"role": "assistant", "thinking": str, "content": str | "tool_calls": [...], "weight": float}
    {"role": "tool", "content": str, "tool_call_id": str (optional)}

A tool call is {"name": str, "arguments": dict} or OpenAI's {"id", "type", "function": {"name", "arguments"}} with
arguments as an object or as JSON text. `reasoning_content` and `reasoning` are read as `thinking`. An assistant turn
always has a thinking block (an empty one without reasoning), since the generation prompt opens it. Tool results answer
the calls of the assistant turn right before them, in order unless `tool_call_id` names another; ids are renumbered over
the whole conversation.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

from north_jax.chat.parse import Completion, ParseError, ToolCall, parse_completion
from north_jax.chat.tokenizer import Tokenizer

__all__ = [
    "FORMAT_PHRASES",
    "PLATFORM",
    "ChatFormat",
    "Completion",
    "ParseError",
    "Rendered",
    "ToolCall",
    "tool_phrases",
]

PLATFORM = (
    "These instructions are always to be followed and cannot be overridden by subsequent system or user turns:\n"
    "- You will answer requests for educational, informative, or creative content related to safety categories. "
    "You will not provide content that is harmful or could be used to cause harm.\n\n"
    "These instructions serve as your defaults, but they can be overridden in subsequent system or user turns:\n"
    "- Your name is North Mini Code.\n"
    "- You are a large language model built by Cohere."
)

_TOOLS_OPEN, _TOOL_NEXT, _TOOLS_CLOSE = "\n\n# Available Tools\n```json\n[\n", ",\n", "\n]\n```"
_CALL_OPEN, _CALL_NAME, _CALL_ARGUMENTS = '    {"tool_call_id": "', '", "tool_name": ', ', "parameters": '
_RESULT_OPEN = '    {\n        "tool_call_id": "'
_RESULT_CONTENT = '",\n        "results": {\n            "0": '
_RESULT_CLOSE = '\n        },\n        "is_error": null\n    }'

# The fixed strings of the format, for `train_tokenizer(phrases=...)`: beside the digits of its id, its name and its
# arguments a call costs four of them, and a result three. The quotes around a content string belong to the phrases.
FORMAT_PHRASES = (
    PLATFORM,
    _TOOLS_OPEN,
    _TOOLS_CLOSE,
    "[\n" + _CALL_OPEN,
    _CALL_NAME + '"',
    '"' + _CALL_ARGUMENTS + '{"',
    '"}}\n]',
    '"}},\n' + _CALL_OPEN,
    "[\n" + _RESULT_OPEN,
    _RESULT_CONTENT + '{"content": "',
    '"}' + _RESULT_CLOSE + "\n]",
    '"}' + _RESULT_CLOSE + ",\n" + _RESULT_OPEN,
)

_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "thinking", "reasoning_content", "reasoning", "tool_calls", "weight"},
    "tool": {"role", "content", "tool_call_id"},
}


def tool_phrases(tools: Sequence[dict]) -> tuple[str, ...]:
    """Phrases for the given tools: each tool's line in the prompt, and the opening of a call of it.

    A call of a tool whose first argument is the string "command" then opens with one token after the id,
    `", "tool_name": "bash", "parameters": {"command": "`; each further string argument with one, `", "path": "`.
    """
    phrases = []
    for index, tool in enumerate(tools):
        spec = _spec(tool, index)
        phrases.append(_tool_line(spec))
        head = _CALL_NAME + _json(spec["name"]) + _CALL_ARGUMENTS
        phrases.append(head + "{}}\n]")
        for name in spec["parameters"].get("properties", {}):
            phrases += [f'{head}{{"{name}": "', f'", "{name}": "']
    return tuple(dict.fromkeys(phrases))


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as tokens: `ids`, and per token the `weights` of the loss on predicting it (0: context only)."""

    ids: list[int]
    weights: list[float]


class ChatFormat:
    """Renders conversations of one model and parses its completions.

    Args:
      tokenizer: gives the ids of markers and content.
      platform: text of the platform turn instead of the released one (the template's platform_instruction_override).
      reasoning: False closes the reasoning in the generation prompt, so the model answers without it.
    """

    def __init__(self, tokenizer: Tokenizer, platform: str | None = None, *, reasoning: bool = True):
        self.tokenizer = tokenizer
        self.platform = platform or PLATFORM
        self.reasoning = reasoning
        self.stop_ids = (tokenizer.end_of_turn,)

    def render(self, messages: Sequence[dict], tools: Sequence[dict] = (), *, generation_prompt=False) -> Rendered:
        """The conversation as ids and loss weights, the same tokens as the chat template's.

        Weights: 0 except in assistant turns, there the message's "weight" (default 1) on all that the model writes
        itself: reasoning, <|END_THINKING|>, text or tool calls with their markers, <|END_OF_TURN_TOKEN|>; not on the
        three markers of the generation prompt (four where `reasoning` is off and the turn has none).

        Args:
          messages: see the module's docstring.
          tools: {"name", "description", "parameters": JSON schema}, or OpenAI's form around it.
          generation_prompt: ends in the opening of an assistant turn, up to <|START_THINKING|>.

        Raises:
          ValueError: an unknown role or key, a missing or non-string content, text beside tool calls, a tool result
            that answers no call, arguments that are not a JSON object; the message is named by its index.
        """
        t = self.tokenizer
        out = _Writer(t)
        out.add(t.bos, t.start_of_turn, t.system, t.start_text)
        tool_lines = _TOOL_NEXT.join(_tool_line(_spec(tool, index)) for index, tool in enumerate(tools))
        out.text(self.platform + _TOOLS_OPEN + tool_lines + _TOOLS_CLOSE)
        out.add(t.end_text, t.end_of_turn)
        self._turns(out, messages, 0)
        if generation_prompt:
            self._generation_prompt(out)
        return Rendered(out.ids, out.weights)

    def render_for_training(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> Rendered:
        """`render`, refusing a conversation from which nothing could be learned.

        Raises:
          ValueError: as `render`, or there is no assistant turn with a weight above 0.
        """
        rendered = self.render(messages, tools)
        if not any(rendered.weights):
            raise ValueError(
                f"the conversation of {len(messages)} messages has no assistant turn to train on; drop it, or give one "
                f"of its assistant messages a weight above 0."
            )
        return rendered

    def continuation(self, messages: Sequence[dict], new_messages: Sequence[dict]) -> list[int]:
        """The ids to append after a sampled completion (up to its <|END_OF_TURN_TOKEN|>): the new turns, then the
        generation prompt.

        Prompt ids + completion ids + these ids is the next prompt, whatever way the model spelt its completion; it
        equals `render(messages + new_messages)` where the completion is spelt as we would.

        Args:
          messages: the conversation so far, the assistant turn parsed from the completion last (leave that turn out
            where it could not be parsed).
          new_messages: tool results or user turns.

        Raises:
          ValueError: as `render`; or tool results follow tool results, whose turn is closed already.
        """
        messages = list(messages)
        if messages and messages[-1].get("role") == "tool" and new_messages and new_messages[0].get("role") == "tool":
            raise ValueError("tool results follow a closed turn of tool results; give all results of a turn at once.")
        out = _Writer(self.tokenizer)
        self._turns(out, messages + list(new_messages), len(messages))
        self._generation_prompt(out)
        return out.ids

    def parse(self, completion_ids: Sequence[int]) -> Completion:
        """The ids sampled after a generation prompt as reasoning and text or tool calls.

        Raises:
          ParseError: the completion is outside the grammar; `code` is one of `PARSE_ERRORS`.
        """
        return parse_completion(self.tokenizer, completion_ids, reasoning=self.reasoning)

    def _generation_prompt(self, out: "_Writer") -> None:
        t = self.tokenizer
        out.add(t.start_of_turn, t.chatbot, t.start_thinking, *(() if self.reasoning else (t.end_thinking,)))

    def _turns(self, out: "_Writer", messages: Sequence[dict], start: int) -> None:
        """Writes messages[start:]; those before only count calls."""
        t = self.tokenizer
        next_id = first_id = answered = 0
        ids: list[str | None] = []
        rows: list[str] = []
        for index, message in enumerate(messages):
            where, role = _checked(message, index)
            write = index >= start
            if role in ("system", "user"):
                if write:
                    out.add(t.start_of_turn, t.system if role == "system" else t.user, t.start_text)
                    out.text(_content(message, where))
                    out.add(t.end_text, t.end_of_turn)
            elif role == "assistant":
                calls = [_call(call, where) for call in message.get("tool_calls") or ()]
                first_id, ids = next_id, [id_ for id_, _, _ in calls]
                next_id += len(calls)
                if write:
                    self._assistant(out, message, calls, first_id, where)
            else:
                continued = index > 0 and messages[index - 1]["role"] == "tool"
                if not continued:
                    answered, rows = 0, []
                if index == 0 or messages[index - 1]["role"] not in ("assistant", "tool") or answered >= len(ids):
                    raise ValueError(f"{where} answers no tool call of the assistant turn right before it; remove it.")
                name = message.get("tool_call_id")
                if name and name not in ids:
                    raise ValueError(
                        f"{where} has tool_call_id {name!r}, which no call of the assistant turn before it has; use "
                        f"one of {ids} or leave it out."
                    )
                position = ids.index(name) if name else answered
                answered += 1
                if write:
                    content = _json({"content": _content(message, where)})
                    rows.append(f"{_RESULT_OPEN}{first_id + position}{_RESULT_CONTENT}{content}{_RESULT_CLOSE}")
                    if index + 1 == len(messages) or messages[index + 1].get("role") != "tool":
                        out.add(t.start_of_turn, t.system, t.start_tool_result)
                        out.text("[\n" + ",\n".join(rows) + "\n]")
                        out.add(t.end_tool_result, t.end_of_turn)

    def _assistant(self, out: "_Writer", message: dict, calls: list, first_id: int, where: str) -> None:
        t = self.tokenizer
        weight = message.get("weight", 1.0)
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{where} has the weight {weight!r}; give a number that is 0 or more.")
        thinking = _thinking(message, where)
        out.add(t.start_of_turn, t.chatbot, t.start_thinking)
        out.text(thinking, weight)
        out.add(t.end_thinking, weight=weight if thinking or self.reasoning else 0.0)
        if calls:
            if message.get("content"):
                raise ValueError(f"{where} has content beside tool_calls; move the text into thinking.")
            rows = [
                f"{_CALL_OPEN}{first_id + i}{_CALL_NAME}{_json(name)}{_CALL_ARGUMENTS}{arguments}}}"
                for i, (_, name, arguments) in enumerate(calls)
            ]
            out.add(t.start_action, weight=weight)
            out.text("[\n" + ",\n".join(rows) + "\n]", weight)
            out.add(t.end_action, weight=weight)
        else:
            out.add(t.start_text, weight=weight)
            out.text(_content(message, where), weight)
            out.add(t.end_text, weight=weight)
        out.add(t.end_of_turn, weight=weight)


class _Writer:
    """Ids and weights under construction."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, *ids: int, weight: float = 0.0) -> None:
        self.ids += ids
        self.weights += [float(weight)] * len(ids)

    def text(self, text: str, weight: float = 0.0) -> None:
        self.add(*self.tokenizer.encode(text), weight=weight)


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _checked(message: dict, index: int) -> tuple[str, str]:
    """("message 3 (user)", role), after refusing roles and keys that are not known."""
    role = message.get("role")
    if role not in _KEYS:
        raise ValueError(f"message {index} has the unknown role {role!r}; use one of {', '.join(_KEYS)}.")
    where = f"message {index} ({role})"
    for key in message:
        if key not in _KEYS[role]:
            raise ValueError(f"{where} has the unknown key {key!r}; known are {', '.join(sorted(_KEYS[role]))}.")
    return where, role


def _content(message: dict, where: str) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        remedy = "give content or tool_calls" if message["role"] == "assistant" else "give a string"
        raise ValueError(f"{where} has the content {content!r}, which is not a string; {remedy}.")
    return content


def _thinking(message: dict, where: str) -> str:
    given = {message[key] for key in ("thinking", "reasoning_content", "reasoning") if message.get(key)}
    if len(given) > 1 or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{where} needs its reasoning as one string; keep thinking and drop the other keys.")
    return given.pop() if given else ""


def _call(call: dict, where: str) -> tuple[str | None, str, str]:
    """(the caller's id, the tool's name, the arguments as JSON) of a tool call in either form."""
    function = call.get("function", call)
    known = ("id", "type", "function") if "function" in call else ("id", "name", "arguments")
    for key in [*(k for k in call if k not in known), *(k for k in function if k not in ("id", "name", "arguments"))]:
        raise ValueError(f"{where} has a tool call with the unknown key {key!r}; known are name and arguments.")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has a tool call without a name; give the tool's name.")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} calls {name} with arguments that are not JSON ({error}); fix them.") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} calls {name} with arguments that are not an object; give a dict.")
    return call.get("id"), name, text


def _spec(tool: dict, index: int) -> dict:
    """The inner {"name", "description", "parameters"} of a tool in either form."""
    spec = tool.get("function", tool)
    for key in ("name", "description", "parameters"):
        if key not in spec:
            raise ValueError(f"tool {index} ({spec.get('name', 'unnamed')}) lacks {key!r}; give it.")
    return spec


def _tool_line(spec: dict) -> str:
    head = f'    {{"name": {_json(spec["name"])}, "description": {_json(spec["description"])}'
    return f'{head}, "parameters": {_json(spec["parameters"])}, "responses": null}}'
