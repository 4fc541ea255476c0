"""A completion read while it is still being drawn: tokens in, pieces of reasoning, text and tool calls out.

For a completion inside the grammar the pieces, put together, are what `parse_completion` returns at the end. One
outside it is read as far as it goes: nothing is refused, since what was sent cannot be taken back.
"""

import codecs
import dataclasses
import json
from collections.abc import Generator

from north_jax.chat.tokenizer import Tokenizer

_SPACE = " \t\r\n"


@dataclasses.dataclass(frozen=True)
class Piece:
    """The next piece of a completion. `kind`: "reasoning", "text", or of tool call number `call` its "name" (whole) or
    its "arguments" (JSON text as the model wrote it)."""

    kind: str
    text: str
    call: int = -1


class StreamReader:
    """Reads one completion, the tokens after a generation prompt, in order.

    `reasoning` False: the prompt closed the reasoning already. `action` is the text of the block of tool calls so far.
    """

    def __init__(self, tokenizer: Tokenizer, *, reasoning: bool = True):
        self.tokenizer = tokenizer
        self.action = ""
        self.reasoning_tokens = 0
        self._block = "reasoning" if reasoning else "between"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[Piece] = []
        self._scan = _calls(self._pieces)
        next(self._scan)

    def feed(self, id_: int, cut: int | None = None) -> list[Piece]:
        """The pieces that the token completes. `cut`: only its first bytes, where a stop string begins inside it."""
        self.reasoning_tokens += self._block == "reasoning"
        if id_ >= self.tokenizer.vocab_size:  # the model has more rows than the tokenizer has tokens
            return []
        if id_ in self.tokenizer.marker_names and cut is None:
            self._marker(id_)
        else:
            self._content(self._decoder.decode(self.tokenizer.decode_bytes([id_])[:cut]))
        return self._taken()

    def close(self) -> list[Piece]:
        """What is left when the completion ends here: a character that was cut in two, as U+FFFD."""
        self._content(self._decoder.decode(b"", final=True))
        return self._taken()

    def _marker(self, id_: int) -> None:
        t = self.tokenizer
        self._content(self._decoder.decode(b"", final=True))
        if id_ == t.end_of_turn:
            self._block = "done"
        elif self._block == "between" and id_ in (t.start_text, t.start_action):
            self._block = "text" if id_ == t.start_text else "action"
        elif id_ == {"reasoning": t.end_thinking, "text": t.end_text, "action": t.end_action}.get(self._block):
            self._block = "between"
        else:
            self._content(t.marker_names[id_])

    def _content(self, text: str) -> None:
        if not text or self._block == "done":
            return
        if self._block != "action":
            self._pieces.append(Piece("reasoning" if self._block == "reasoning" else "text", text))
            return
        self.action += text
        for char in text:
            self._scan.send(char)

    def _taken(self) -> list[Piece]:
        """The pieces so far, neighbours of one kind joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            if joined and piece.kind != "name" and (joined[-1].kind, joined[-1].call) == (piece.kind, piece.call):
                joined[-1] = Piece(piece.kind, joined[-1].text + piece.text, piece.call)
            else:
                joined.append(piece)
        self._pieces.clear()
        return joined


Chars = Generator[None, str, str]


def _calls(out: list[Piece]) -> Generator[None, str, None]:
    """Is sent the characters of a block of tool calls one by one, and puts names and arguments out as they come."""
    yield from _array(out)
    while True:  # behind the array, or behind what is no call: the strict parser will name the fault
        yield


def _array(out: list[Piece]) -> Generator[None, str, None]:
    if (yield from _next()) != "[":
        return
    char, call = (yield from _next()), 0
    while char == "{":
        held: list[str] | None = []  # arguments that came before the name
        char = yield from _next()
        while char == '"':
            key = yield from _string()
            colon, char = (yield from _next()), (yield from _next())
            if colon != ":":
                return
            if key == "parameters" and char == "{":
                yield from _object(out, call, held)
            elif key in ("tool_call_id", "tool_name") and char == '"':
                value = yield from _string()
                if value is None:
                    return
                if key == "tool_name":
                    out.append(Piece("name", value, call))
                    out += [Piece("arguments", text, call) for text in held or ()]
                    held = None
            else:
                return
            if (char := (yield from _next())) == ",":
                char = yield from _next()
        if char != "}":
            return
        call += 1
        if (char := (yield from _next())) == ",":
            char = yield from _next()


def _next() -> Chars:
    while (char := (yield)) in _SPACE:
        pass
    return char


def _string() -> Generator[None, str, str | None]:
    """The rest of a JSON string after its opening quote; None where it is none."""
    raw = '"'
    while (char := (yield)) != '"':
        raw += char
        if char == "\\":
            raw += yield
    try:
        return json.loads(raw + '"')
    except ValueError:
        return None


def _object(out: list[Piece], call: int, held: list[str] | None) -> Generator[None, str, None]:
    """The rest of a JSON object after its opening brace, put out (or held back) as it comes."""

    def put(char: str) -> str:
        if held is None:
            out.append(Piece("arguments", char, call))
        else:
            held.append(char)
        return char

    put("{")
    depth = 1
    while depth:
        char = put((yield))
        if char == '"':
            while (char := put((yield))) != '"':
                if char == "\\":
                    put((yield))
        else:
            depth += (char in "{[") - (char in "}]")
