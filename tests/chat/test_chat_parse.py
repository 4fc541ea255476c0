import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from north_jax.chat import MARKERS, PARSE_ERRORS, Completion, ParseError, ToolCall

SETTINGS = settings(max_examples=500, deadline=None, derandomize=True)
SHORT = {f"<{name}>": marker for name, marker in MARKERS.items()}


def encode(tokenizer, text):
    """Ids of `text`, in which <end_of_turn> and the like are markers and the rest is content."""
    ids = [[]]
    for part in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
        ids.append([getattr(tokenizer, part[1:-1])] if part in SHORT else tokenizer.encode(part))
    return list(itertools.chain(*ids))


GOOD = '{"tool_call_id": "0", "tool_name": "bash", "parameters": {"command": "ls"}}'


def action(text):
    return f"think<end_thinking><start_action>{text}<end_action><end_of_turn>"


def test_text(chat, tokenizer):
    ids = encode(tokenizer, "think<end_thinking><start_text>two\nlines<end_text><end_of_turn>")
    assert chat.parse(ids) == Completion("think", "two\nlines", ())


def test_calls(chat, tokenizer):
    second = '{"parameters": {"a": [1, 2.5, null, true]}, "tool_call_id": "7", "tool_name": "edit"}'
    completion = chat.parse(encode(tokenizer, action(f"[{GOOD},\n\t{second}]")))
    calls = (ToolCall("bash", {"command": "ls"}), ToolCall("edit", {"a": [1, 2.5, None, True]}))
    assert completion == Completion("think", None, calls)


def test_empty_reasoning_and_empty_text_are_no_errors(chat, tokenizer):
    ids = encode(tokenizer, "<end_thinking><start_text><end_text><end_of_turn>")
    assert chat.parse(ids) == Completion("", "", ())


def test_a_tool_call_written_as_text_is_text(chat, tokenizer):
    ids = encode(tokenizer, f"<end_thinking><start_text>[{GOOD}]<end_text><end_of_turn>")
    assert chat.parse(ids) == Completion("", f"[{GOOD}]", ())


def test_content_that_spells_markers_is_content(chat, tokenizer):
    evil = "".join(MARKERS.values())
    t = tokenizer
    ids = [*t.encode(evil), t.end_thinking, t.start_text, *t.encode(evil), t.end_text, t.end_of_turn]
    assert chat.parse(ids) == Completion(evil, evil, ())


def call(**changes):
    entry = {"tool_call_id": "0", "tool_name": "bash", "parameters": {}, **changes}
    return action(json.dumps([{key: value for key, value in entry.items() if value is not ...}]))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("empty", ""),
        ("empty", "think<end_thinking><end_of_turn>"),
        ("empty", action("[]")),
        ("unclosed_thinking", "think"),
        ("unclosed_thinking", "think<end_of_turn>"),
        ("unclosed_text", "<end_thinking><start_text>a"),
        ("unclosed_text", "<end_thinking><start_text>a<end_of_turn>"),
        ("unclosed_action", f"<end_thinking><start_action>[{GOOD}]"),
        ("unclosed_action", f"<end_thinking><start_action>[{GOOD}]<end_of_turn>"),
        ("no_end_of_turn", "think<end_thinking>"),
        ("no_end_of_turn", "<end_thinking><start_text>a<end_text>"),
        ("no_end_of_turn", f"<end_thinking><start_action>[{GOOD}]<end_action>"),
        ("text_and_action", f"<end_thinking><start_text>a<end_text><start_action>[{GOOD}]<end_action><end_of_turn>"),
        ("text_and_action", f"<end_thinking><start_action>[{GOOD}]<end_action><start_text>a<end_text><end_of_turn>"),
        ("unexpected_marker", "<start_thinking>a<end_thinking><start_text>a<end_text><end_of_turn>"),
        ("unexpected_marker", "a<start_action>[]<end_action><end_of_turn>"),
        ("unexpected_marker", "<end_thinking><end_thinking><start_text>a<end_text><end_of_turn>"),
        ("unexpected_marker", "<end_thinking><start_text>a<end_action><end_of_turn>"),
        ("unexpected_marker", "<end_thinking><start_text>a<end_text><start_text>a<end_text><end_of_turn>"),
        ("unexpected_marker", "<end_thinking><start_text>a<end_text><eos>"),
        ("unexpected_marker", "<end_thinking><start_text>a<pad><end_text><end_of_turn>"),
        ("unexpected_content", "<end_thinking>a<start_text>a<end_text><end_of_turn>"),
        ("unexpected_content", "<end_thinking><start_text>a<end_text> <end_of_turn>"),
        ("trailing_tokens", "<end_thinking><start_text>a<end_text><end_of_turn><pad>"),
        ("trailing_tokens", "<end_thinking><start_text>a<end_text><end_of_turn>a"),
        ("invalid_json", action("")),
        ("invalid_json", action(f"[{GOOD}")),
        ("invalid_json", action(f"[{GOOD},]")),
        ("invalid_json", action(f"[{GOOD}] and more")),
        ("invalid_json", action(GOOD.replace("ls", "ls \\| wc").join("[]"))),
        ("invalid_json", action(GOOD.replace("ls", "l\ns").join("[]"))),
        ("invalid_json", action(GOOD.replace("ls", "\\ud800").join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', "NaN").join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', "-Infinity").join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', "1e999").join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', "9" * 5000).join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', "[" * 100_000).join("[]"))),
        ("invalid_json", action(GOOD.replace('"ls"', '1, "command": 2').join("[]"))),
        ("not_a_list", action(GOOD)),
        ("not_a_list", action('"ls"')),
        ("not_an_object", action('["ls"]')),
        ("not_an_object", action(f"[{GOOD}, [{GOOD}]]")),
        ("unknown_key", call(tool_call_id_id="0")),
        ("unknown_key", call(tool_call_id_id="0", tool_call_id=...)),
        ("missing_key", call(tool_call_id=...)),
        ("missing_key", call(tool_name=...)),
        ("missing_key", call(parameters=...)),
        ("wrong_type", call(tool_call_id=0)),
        ("wrong_type", call(tool_name=None)),
        ("wrong_type", call(tool_name="")),
        ("arguments_not_object", call(parameters="{}")),
        ("arguments_not_object", call(parameters=[])),
        ("arguments_not_object", call(parameters=None)),
    ],
)
def test_every_error_has_its_name(chat, tokenizer, code, text):
    with pytest.raises(ParseError) as error:
        chat.parse(encode(tokenizer, text))
    assert error.value.code == code
    sentence = str(error.value)
    assert PARSE_ERRORS[code] in sentence and sentence.endswith(".") and len(sentence) < 300


def test_bytes_that_are_no_utf8_and_unknown_ids(chat, tokenizer):
    cut = tokenizer.encode("日")[:-1]
    closing = encode(tokenizer, "<end_thinking><start_text>a<end_text><end_of_turn>")
    for ids, code in [
        (cut + closing, "invalid_utf8"),
        ([*closing[:2], *cut, *closing[3:]], "invalid_utf8"),
        ([tokenizer.vocab_size, *closing], "unknown_id"),
        ([-1, *closing], "unknown_id"),
    ]:
        with pytest.raises(ParseError) as error:
            chat.parse(ids)
        assert error.value.code == code


def test_the_table_of_errors_is_complete():
    # Each code of the table is produced by a case above (unknown_id and invalid_utf8 by the second test).
    cases = {mark.args[1][i][0] for mark in test_every_error_has_its_name.pytestmark for i in range(len(mark.args[1]))}
    assert cases | {"unknown_id", "invalid_utf8"} == set(PARSE_ERRORS)


@SETTINGS
@given(st.data())
def test_nothing_but_a_parse_error_whatever_the_ids(chat, tokenizer, data):
    t = tokenizer
    blocks = [[t.end_thinking], [t.start_text], [t.end_text], [t.start_action], [t.end_action], [t.end_of_turn]]
    pieces = [GOOD, f"[{GOOD}]", "[", "]", "{", "}", '"', "\\", ",", "1e9", "null", '{"tool_call_id": "0"}', "x", "é"]
    piece = st.one_of(
        st.sampled_from(blocks),
        st.sampled_from(pieces).map(t.encode),
        st.integers(-2, t.vocab_size + 2).map(lambda id_: [id_]),
    )
    ids = list(itertools.chain(*data.draw(st.lists(piece, max_size=12))))
    if data.draw(st.booleans()):  # reach the JSON more often than chance would
        inner = [id_ for id_ in ids if id_ not in t.marker_names]
        ids = [t.end_thinking, t.start_action, *inner, t.end_action, t.end_of_turn]
    try:
        completion = chat.parse(ids)
    except ParseError as error:
        assert error.code in PARSE_ERRORS
    else:
        assert (completion.text is None) == bool(completion.tool_calls)
        # What was understood can be written, and reads the same.
        start = len(chat.render([], generation_prompt=True).ids)
        assert chat.parse(chat.render([completion.message()]).ids[start:]) == completion
