"""The tokenizer: a byte-level BPE in a Hugging Face folder, and the markers of the prompt format resolved by name."""

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers

from north_jax.chat.template import chat_template

# Attribute of `Tokenizer` -> token in the vocabulary. The first five stand at their ids in the released vocabulary too.
MARKERS = {
    "pad": "<PAD>",
    "mask": "<MASK_TOKEN>",
    "bos": "<BOS_TOKEN>",
    "eos": "<EOS_TOKEN>",
    "unk": "<UNK>",
    "start_of_turn": "<|START_OF_TURN_TOKEN|>",
    "end_of_turn": "<|END_OF_TURN_TOKEN|>",
    "user": "<|USER_TOKEN|>",
    "chatbot": "<|CHATBOT_TOKEN|>",
    "system": "<|SYSTEM_TOKEN|>",
    "start_thinking": "<|START_THINKING|>",
    "end_thinking": "<|END_THINKING|>",
    "start_text": "<|START_TEXT|>",
    "end_text": "<|END_TEXT|>",
    "start_action": "<|START_ACTION|>",
    "end_action": "<|END_ACTION|>",
    "start_tool_result": "<|START_TOOL_RESULT|>",
    "end_tool_result": "<|END_TOOL_RESULT|>",
}

# As in the released file, only these are flagged "special"; the turn markers are plain added tokens.
_SPECIAL = {"<PAD>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<UNK>", "<|END_OF_TURN_TOKEN|>"}

# A word has the same tokens wherever it stands: after a space, a quote, a slash, or a newline written as \n in JSON
# (hence the first alternative: otherwise "\nsrc" would begin a word "nsrc"). Digits stand alone.
_PIECES = r'\\["\\/bfnrtu]|\p{L}+|\p{N}| +|\n+|\t+|[^\s\p{L}\p{N}\\]+'


def train_tokenizer(
    texts: Iterable[str], path: str | pathlib.Path, *, vocab_size: int, phrases: Sequence[str] = ()
) -> None:
    """Trains a byte-level BPE and writes it as a Hugging Face tokenizer folder.

    Ids: the markers 0..17 in the order of `MARKERS`, the 256 bytes, the merges, the phrases. The end-of-sequence token
    is the end of turn. The folder holds tokenizer.json, tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja, and is what `transformers.AutoTokenizer` reads.

    Args:
      texts: training texts; markers and phrases inside them are cut out first, so no merge is spent on them.
      path: folder to write.
      vocab_size: upper bound of the number of tokens, phrases included (fewer when the texts run out of pairs).
      phrases: fixed strings that each become one token (see `FORMAT_PHRASES`); ASCII only.

    Raises:
      ValueError: for a vocabulary too small for bytes, markers and phrases; for a phrase that is empty, not ASCII, or
        that overlaps a marker.
    """
    phrases = list(dict.fromkeys(phrases))
    for phrase in phrases:
        _check_phrase(phrase)
    smallest = len(MARKERS) + 256 + len(phrases)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {len(MARKERS)} markers, 256 bytes and {len(phrases)} phrases need "
            f"at least {smallest}."
        )
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases),
        min_frequency=2,
        show_progress=False,
        special_tokens=list(MARKERS.values()),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    fixed = sorted([*MARKERS.values(), *phrases], key=len, reverse=True)
    tok.train_from_iterator(_cut(texts, re.compile("|".join(map(re.escape, fixed)))), trainer)
    tok.add_tokens([tokenizers.AddedToken(phrase, normalized=False, special=False) for phrase in phrases])

    spec = json.loads(tok.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in _SPECIAL
    names = {
        "bos_token": MARKERS["bos"],
        "eos_token": MARKERS["end_of_turn"],
        "pad_token": MARKERS["pad"],
        "unk_token": MARKERS["unk"],
        "mask_token": MARKERS["mask"],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # The template writes the beginning-of-sequence token itself.
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **names,
    }
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer", spec), ("tokenizer_config", config), ("special_tokens_map", names)):
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def _check_phrase(phrase: str) -> None:
    if not phrase or not phrase.isascii():
        raise ValueError(f"phrase {phrase!r} must be a non-empty ASCII string; leave it to the merges instead.")
    for marker in MARKERS.values():
        # A phrase ending in the first characters of a marker would swallow them wherever the marker follows.
        if marker in phrase or any(phrase.endswith(marker[:n]) for n in range(1, len(marker))):
            raise ValueError(f"phrase {phrase!r} overlaps the marker {marker}; cut the phrase before it.")


def _cut(texts: Iterable[str], fixed: re.Pattern) -> Iterator[str]:
    for text in texts:
        yield from filter(None, fixed.split(text))


class Tokenizer:
    """Text to token ids and back, with the markers of the prompt format as attributes.

    Attributes:
      path: the folder it was read from.
      vocab_size: number of ids, added tokens included (the embedding's rows).
      pad, mask, bos, eos, unk, start_of_turn, end_of_turn, user, chatbot, system, start_thinking, end_thinking,
        start_text, end_text, start_action, end_action, start_tool_result, end_tool_result: ids.
      marker_names: id -> marker, for all of them.
      special: ids that the file flags "special", which a decoder may be asked to leave out.
    """

    pad: int
    mask: int
    bos: int
    eos: int
    unk: int
    start_of_turn: int
    end_of_turn: int
    user: int
    chatbot: int
    system: int
    start_thinking: int
    end_thinking: int
    start_text: int
    end_text: int
    start_action: int
    end_action: int
    start_tool_result: int
    end_tool_result: int

    def __init__(self, spec: dict, path: pathlib.Path):
        """`spec`: the parsed tokenizer.json at `path`; see `load`."""
        added = {token["content"]: token for token in spec.get("added_tokens", ())}
        self.special = frozenset(token["id"] for token in added.values() if token.get("special"))
        for name, marker in MARKERS.items():
            if marker not in added:
                raise ValueError(
                    f"the tokenizer in {path} lacks the marker {marker}; use a tokenizer of this model family or train "
                    f"one with north_jax.chat.train_tokenizer."
                )
            setattr(self, name, added[marker]["id"])
            # Flagged special here (the released file flags only some) so that the encoder can be told to leave all of
            # them alone: content that spells a marker is then plain bytes.
            added[marker]["special"] = True
        if "ByteLevel" not in json.dumps(spec.get("decoder")):
            raise ValueError(f"the tokenizer in {path} has no ByteLevel decoder; only byte-level BPE is supported.")
        self.path = path
        self.marker_names = {added[marker]["id"]: marker for marker in MARKERS.values()}
        self._tok = tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
        self._tok.encode_special_tokens = True
        self._marker_ids = {marker: id_ for id_, marker in self.marker_names.items()}
        self._markers = re.compile(f"({'|'.join(map(re.escape, self._marker_ids))})")
        self._encode_cached = functools.lru_cache(maxsize=1 << 16)(self._encode)

        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        by_id = {token["id"]: token["content"].encode() for token in added.values()}
        for token, id_ in self._tok.get_vocab(with_added_tokens=False).items():
            if id_ not in by_id:
                # Entries outside the byte alphabet stand for themselves, as in the library's own decoder.
                in_alphabet = all(char in byte_of for char in token)
                by_id[id_] = bytes(byte_of[char] for char in token) if in_alphabet else token.encode()
        self.vocab_size = max(by_id) + 1
        self._bytes = [by_id.get(id_, b"") for id_ in range(self.vocab_size)]

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Reads a Hugging Face tokenizer folder.

        Raises:
          FileNotFoundError: the folder has no tokenizer.json.
          ValueError: the file is not JSON, lacks a marker (named), or is not byte-level.
        """
        path = pathlib.Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; give a Hugging Face tokenizer folder.")
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON ({error}); copy the file again.") from error
        return cls(spec, path)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as content: never a marker, whatever the text spells.

        Raises:
          ValueError: the text holds a lone surrogate, which no UTF-8 can express.
        """
        return list(self._encode_cached(text))

    def encode_marked(self, text: str, gap: str = "") -> list[int]:
        """Ids of a rendered prompt, in which what spells a marker is that marker; `gap` is taken out of the rest.

        Raises:
          ValueError: as `encode`.
        """
        ids: list[int] = []
        for index, part in enumerate(self._markers.split(text)):
            if index % 2:
                ids.append(self._marker_ids[part])
            elif part:
                ids += self.encode(part.replace(gap, "") if gap else part)
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at character {error.start}; decode the source with errors='replace'."
            ) from error
        return tuple(self._tok.encode(text, add_special_tokens=False).ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes the ids stand for, markers spelt out; the exact inverse of `encode` (up to UTF-8).

        Raises:
          ValueError: an id outside 0 .. vocab_size - 1.
        """
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise ValueError(f"token id {id_} is outside the vocabulary of {self.vocab_size} tokens.")
        return b"".join([self._bytes[id_] for id_ in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """`decode_bytes` as text; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE (the GPT-2 convention)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
