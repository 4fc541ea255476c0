import json
import pathlib
import shutil

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from north_jax.chat import FORMAT_PHRASES, MARKERS, Tokenizer, chat_template, train_tokenizer

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)
PIECES = [
    *MARKERS.values(),
    *FORMAT_PHRASES,
    "<|",
    "|>",
    "\\n",
    '\\"',
    "\n    ",
    "é",
    "日本",
    "👩‍🚀",
    "\r\n",
    "\x00",
    " ",
]
texts = st.lists(st.one_of(st.text(), st.sampled_from(PIECES))).map("".join)


@SETTINGS
@given(texts)
@example("".join(PIECES))
def test_encode_decode_is_the_identity_and_gives_no_marker(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.marker_names)


def test_every_byte_has_a_token(tokenizer):
    single = {tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_markers_stand_at_the_released_low_ids_and_decode_to_their_names(tokenizer):
    assert (tokenizer.pad, tokenizer.mask, tokenizer.bos, tokenizer.eos, tokenizer.unk) == (0, 1, 2, 3, 4)
    ids = [getattr(tokenizer, name) for name in MARKERS]
    assert ids == list(range(len(MARKERS)))
    assert [tokenizer.decode([id_]) for id_ in ids] == list(MARKERS.values())


def test_phrases_are_single_tokens_and_the_vocabulary_size_counts_them(tokenizer):
    for phrase in FORMAT_PHRASES:
        assert len(tokenizer.encode(phrase)) == 1
    assert tokenizer.vocab_size == tokenizer.encode(FORMAT_PHRASES[0])[0] + len(tokenizer._bytes) - min(
        tokenizer.encode(phrase)[0] for phrase in FORMAT_PHRASES
    )
    assert tokenizer.vocab_size <= 450


def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer):
    word = tokenizer.encode("report")
    assert len(word) < len("report")
    for before in (" ", '"', "/", "\n", "\\n", "\\t", '\\"', "(", "7", "_", "    "):
        head = tokenizer.encode(before)
        assert tokenizer.encode(before + "report" + "." + "txt") == head + word + tokenizer.encode(".txt"), before


def test_a_newline_escaped_in_json_does_not_glue_to_the_word_after_it(tmp_path):
    # The corpus has "nreport" as a word, so only the cut before "report" keeps the two apart.
    train_tokenizer(["report nreport"] * 9, tmp_path, vocab_size=300)
    tok = Tokenizer.load(tmp_path)
    assert len(tok.encode("nreport")) == 1
    assert tok.encode("\\nreport") == tok.encode("\\n") + tok.encode("report")


def test_digits_and_spaces_stand_alone(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a 2026 b")] == ["a", " ", "2", "0", "2", "6", " ", "b"]


def test_transformers_reads_the_folder(tokenizer, tokenizer_dir):
    hf = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    assert len(hf) == tokenizer.vocab_size
    assert (hf.pad_token_id, hf.bos_token_id, hf.unk_token_id, hf.mask_token_id) == (0, 2, 4, 1)
    assert hf.eos_token_id == tokenizer.end_of_turn
    assert hf.chat_template == chat_template()
    text = 'print("naïve", 12)\n    # 日本\t'
    # No second <BOS_TOKEN>: the template writes it.
    assert hf(text)["input_ids"] == tokenizer.encode(text)
    assert hf.decode(tokenizer.encode(text)) == text
    for name, marker in MARKERS.items():
        assert hf.convert_tokens_to_ids(marker) == getattr(tokenizer, name)


def test_turn_markers_survive_skip_special_tokens_as_in_the_released_file(tokenizer, tokenizer_dir):
    hf = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    ids = [tokenizer.bos, tokenizer.start_text, *tokenizer.encode("x"), tokenizer.end_text, tokenizer.end_of_turn]
    assert hf.decode(ids, skip_special_tokens=True) == "<|START_TEXT|>x<|END_TEXT|>"


@pytest.mark.parametrize("marker", MARKERS.values())
def test_a_folder_without_a_marker_is_refused_by_its_name(tokenizer_dir, tmp_path, marker):
    spec = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != marker]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError) as error:
        Tokenizer.load(tmp_path)
    assert f"lacks the marker {marker};" in str(error.value)


def test_markers_may_stand_at_any_ids_and_a_bos_in_the_post_processor_is_ignored(tmp_path):
    # As in the released folder: turn markers far above the rest, a post-processor that adds <BOS_TOKEN>.
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=list(MARKERS.values())[:5],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(["the file is in the report"], trainer)
    tok.add_tokens([tokenizers.AddedToken(m, normalized=False) for m in list(MARKERS.values())[5:]])
    tok.post_processor = tokenizers.processors.TemplateProcessing(
        single="<BOS_TOKEN> $A", special_tokens=[("<BOS_TOKEN>", 2)]
    )
    tok.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.end_of_turn == tok.token_to_id("<|END_OF_TURN_TOKEN|>") > 256
    text = "the report<|END_OF_TURN_TOKEN|><BOS_TOKEN>"
    assert not set(loaded.encode(text)) & set(loaded.marker_names)
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (None, FileNotFoundError, "does not exist"),
        ('{"added_tokens": [', ValueError, "not valid JSON"),
        ("no-bytes", ValueError, "no ByteLevel decoder"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(tokenizer_dir, tmp_path, content, error, says):
    if content == "no-bytes":
        content = json.dumps({**json.loads((tokenizer_dir / "tokenizer.json").read_text()), "decoder": None})
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(error, match=says) as info:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(info.value)


@pytest.mark.parametrize("phrase", ["", "été", "a<|END_TEXT|>b", 'x"<|', "turn <"])
def test_bad_phrases_are_refused(tmp_path, phrase):
    with pytest.raises(ValueError, match="phrase"):
        train_tokenizer(["text"], tmp_path, vocab_size=400, phrases=[phrase])


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 276"):
        train_tokenizer(["text"], tmp_path, vocab_size=275, phrases=["a b", "c d", "a b"])


def test_text_that_is_no_utf8_and_ids_outside_the_vocabulary_are_refused(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match=f"token id {tokenizer.vocab_size} is outside"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="token id -1 is outside"):
        tokenizer.decode([-1])


def test_a_cut_character_decodes_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("日")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]) == "�"


def test_training_is_deterministic_and_the_folder_can_be_moved(tokenizer, tokenizer_dir, tmp_path):
    moved = pathlib.Path(shutil.copytree(tokenizer_dir, tmp_path / "moved"))
    assert Tokenizer.load(moved).encode("list the files") == tokenizer.encode("list the files")
    for folder in ("a", "b"):
        train_tokenizer(iter(["one two two three"] * 4), tmp_path / folder, vocab_size=300, phrases=["two three"])
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    # The phrase was cut out before training: no merge was spent on a word that only stands inside it.
    assert "three" not in json.loads((tmp_path / "a/tokenizer.json").read_text())["model"]["vocab"]
