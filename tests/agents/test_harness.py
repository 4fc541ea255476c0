"""What the expert writes in a style is read back as the same action; anything else is refused by name."""

import pytest

from north_jax.agents.harness import (
    HARNESSES,
    MAX_OBSERVATION_CHARS,
    Create,
    InvalidAction,
    Submit,
    View,
    perform,
)
from north_jax.chat.format import Completion, ToolCall
from north_jax.envs import SandboxPool, make_sandbox
from north_jax.envs.tasks import Replace, Run


@pytest.fixture(scope="module")
def sandbox():
    with SandboxPool(make_sandbox, 1) as pool, pool.lend() as sandbox:
        yield sandbox


def completion(message: dict) -> Completion:
    calls = tuple(ToolCall(c["name"], c["arguments"]) for c in message.get("tool_calls", ()))
    return Completion(message["thinking"], message.get("content"), calls)


def call(name: str, **arguments) -> Completion:
    return Completion("", None, (ToolCall(name, arguments),))


@pytest.mark.parametrize("name", HARNESSES)
@pytest.mark.parametrize("action", [Run("echo a b > c.txt"), Submit()])
def test_write_then_read(name, action):
    harness = HARNESSES[name]
    assert harness.action(completion(harness.write(action, "because"))) == action


@pytest.mark.parametrize("name", HARNESSES)
@pytest.mark.parametrize(
    ("old", "new"),
    [("a * b", "a + b"), ("x[-1]", "x[0]"), ("p/q", r"p\q"), ("k$", "^k."), ("m & n", "m | n")],
)
def test_a_replacement_does_the_same_in_every_style(sandbox, name, old, new):
    harness = HARNESSES[name]
    sandbox.reset({"f.py": f"one {old} two\n"})
    code, output = perform(harness.action(completion(harness.write(Replace("f.py", old, new), ""))), sandbox)
    assert (code, sandbox.read("f.py")) == (0, f"one {new} two\n"), output


def test_the_editor_works_on_files(sandbox):
    editor = HARNESSES["editor"]
    sandbox.reset({"a.txt": "one one\n"})
    view = editor.action(call("str_replace_editor", command="view", path="a.txt"))
    assert view == View("a.txt") and perform(view, sandbox) == (0, "one one\n")
    create = editor.action(call("str_replace_editor", command="create", path="d/b.txt", file_text="x"))
    assert create == Create("d/b.txt", "x") and perform(create, sandbox) == (0, "")
    assert sandbox.read("d/b.txt") == "x"
    assert perform(Replace("a.txt", "one", "two"), sandbox) == (1, "old_str is 2 times in a.txt\n")
    assert perform(Replace("no.txt", "one", "two"), sandbox) == (1, "no file no.txt\n")
    assert perform(View("no.txt"), sandbox) == (1, "no file no.txt\n")


@pytest.mark.parametrize(
    ("name", "bad", "why"),
    [
        ("bash", Completion("", "hello", ()), "exactly one tool call, found 0"),
        ("bash", Completion("", None, (ToolCall("bash", {"command": "a"}),) * 2), "found 2"),
        ("bash", call("python", command="a"), "unknown tool 'python'"),
        ("bash", call("bash", command=3), "argument 'command' is missing or not a string"),
        ("bash", call("bash", command="a", timeout=3), "unexpected argument 'timeout'"),
        ("editor", call("submit", now="x"), "unexpected argument 'now'"),
        ("editor", call("str_replace_editor", command="undo", path="a"), "unknown editor command 'undo'"),
        ("editor", call("str_replace_editor", command="str_replace", path="a", old_str="b"), "argument 'new_str'"),
        ("text", Completion("", "no block", ()), "exactly one bash block, found 0"),
        ("text", call("bash", command="a"), "expected text with one command"),
    ],
)
def test_invalid_actions_are_named(name, bad, why):
    with pytest.raises(InvalidAction, match=why):
        HARNESSES[name].action(bad)


@pytest.mark.parametrize("name", HARNESSES)
def test_observations_are_bounded_and_show_failure(name):
    harness = HARNESSES[name]
    assert len(harness.observation(0, "x" * 10_000)["content"]) < MAX_OBSERVATION_CHARS + 100
    assert "exit 7" in harness.observation(7, "no\n")["content"]
