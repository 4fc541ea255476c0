"""Harnesses: how an agent is told of its task, acts, and is shown what happened. One class a style.

A harness turns a parsed completion into an action or refuses it (`InvalidAction`), words the result of an action as the
next message, and writes the expert's actions in its own style, so that demonstrations and rollouts share one code.
"""

import dataclasses
import re
from typing import Protocol

from north_jax.chat.format import Completion
from north_jax.envs.sandbox import Sandbox
from north_jax.envs.tasks import Replace, Run, Task

MAX_OBSERVATION_CHARS = 600
SUBMIT_LINE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class InvalidAction(ValueError):
    """The completion parses but is no valid action of this harness; the message says why."""


@dataclasses.dataclass(frozen=True)
class Submit:
    """The agent says it is done."""


@dataclasses.dataclass(frozen=True)
class Create:
    """Write a new file."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class View:
    """Show a file."""

    path: str


Action = Run | Replace | Create | View | Submit


class Harness(Protocol):
    """What every style provides."""

    name: str
    system: str
    tools: tuple[dict, ...]
    phrases: tuple[str, ...]  # its fixed strings, for a small tokenizer

    def action(self, completion: Completion) -> Action: ...

    def write(self, action: Action, thought: str) -> dict: ...

    def observation(self, exit_code: int, output: str) -> dict: ...


def start_messages(harness: Harness, task: Task) -> list[dict]:
    """The conversation an episode begins with."""
    return [{"role": "system", "content": harness.system}, {"role": "user", "content": task.instruction}]


def perform(action: Action, sandbox: Sandbox, timeout_s: float = 10.0) -> tuple[int, str]:
    """Carries out an action (but Submit) and returns (exit code, output)."""
    match action:
        case Run(command):
            result = sandbox.run(command, timeout_s)
            note = f"(stopped after {timeout_s:g} s)\n" if result.timed_out else ""
            return result.exit_code, result.output + note
        case View(path):
            text = sandbox.read(path)
            return (1, f"no file {path}\n") if text is None else (0, text)
        case Create(path, text):
            sandbox.write(path, text)
            return 0, ""
        case Replace(path, old, new):
            text = sandbox.read(path)
            if text is None:
                return 1, f"no file {path}\n"
            if text.count(old) != 1:
                return 1, f"old_str is {text.count(old)} times in {path}\n"
            sandbox.write(path, text.replace(old, new))
            return 0, ""
    raise TypeError(f"no sandbox action: {action!r}")


def _cut(output: str) -> str:
    if len(output) <= MAX_OBSERVATION_CHARS:
        return output
    return output[:MAX_OBSERVATION_CHARS] + "\n(output cut)\n"


def _tool(name: str, description: str, properties: dict, required: list[str]) -> dict:
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


def _string() -> dict:
    return {"type": "string"}


_BASH = _tool("bash", "Run a command", {"command": _string()}, ["command"])


def _sed(action: Replace) -> str:
    """The shell form of a replacement; basic regular expression, so the special characters are escaped."""
    old = re.sub(r"([\[\]*.^$/\\])", r"\\\1", action.old)
    new = re.sub(r"([&/\\])", r"\\\1", action.new)
    return f"sed -i 's/{old}/{new}/' {action.path}"


def _shell(action: Action) -> str:
    match action:
        case Run(command):
            return command
        case Replace():
            return _sed(action)
        case View(path):
            return f"cat {path}"
    raise TypeError(f"no shell form of {action!r}")


def _one_call(completion: Completion):
    if len(completion.tool_calls) != 1:
        raise InvalidAction(f"expected exactly one tool call, found {len(completion.tool_calls)}")
    return completion.tool_calls[0]


def _argument(arguments: dict, name: str) -> str:
    if not isinstance(arguments.get(name), str):
        raise InvalidAction(f"argument {name!r} is missing or not a string")
    return arguments[name]


def _only(arguments: dict, *names: str) -> None:
    unexpected = sorted(set(arguments) - set(names))
    if unexpected:
        raise InvalidAction(f"unexpected argument {unexpected[0]!r}")


def _assistant(thought: str, name: str, arguments: dict) -> dict:
    return {"role": "assistant", "thinking": thought, "tool_calls": [{"name": name, "arguments": arguments}]}


class BashHarness:
    """One bash tool; a command that prints the submit line ends the episode."""

    name = "bash"
    system = "Solve the task with bash."
    tools = (_BASH,)
    phrases = (system, f"echo {SUBMIT_LINE}")

    def action(self, completion: Completion) -> Action:
        call = _one_call(completion)
        if call.name != "bash":
            raise InvalidAction(f"unknown tool {call.name!r}")
        _only(call.arguments, "command")
        command = _argument(call.arguments, "command")
        return Submit() if command.strip() == f"echo {SUBMIT_LINE}" else Run(command)

    def write(self, action: Action, thought: str) -> dict:
        command = f"echo {SUBMIT_LINE}" if isinstance(action, Submit) else _shell(action)
        return _assistant(thought, "bash", {"command": command})

    def observation(self, exit_code: int, output: str) -> dict:
        return {"role": "tool", "content": f"exit {exit_code}\n{_cut(output)}"}


class EditorHarness:
    """bash + str_replace_editor + submit."""

    name = "editor"
    system = "Solve the task with the tools, then submit."
    tools = (
        _BASH,
        _tool(
            "str_replace_editor",
            "View, create or edit a file",
            {
                "command": {"type": "string", "enum": ["view", "create", "str_replace"]},
                "path": _string(),
                "file_text": _string(),
                "old_str": _string(),
                "new_str": _string(),
            },
            ["command", "path"],
        ),
        _tool("submit", "Submit the work", {}, []),
    )
    phrases = (system,)

    def action(self, completion: Completion) -> Action:
        call = _one_call(completion)
        arguments = call.arguments
        if call.name == "bash":
            _only(arguments, "command")
            return Run(_argument(arguments, "command"))
        if call.name == "submit":
            _only(arguments)
            return Submit()
        if call.name != "str_replace_editor":
            raise InvalidAction(f"unknown tool {call.name!r}")
        command, path = _argument(arguments, "command"), _argument(arguments, "path")
        if command == "view":
            _only(arguments, "command", "path")
            return View(path)
        if command == "create":
            _only(arguments, "command", "path", "file_text")
            return Create(path, _argument(arguments, "file_text"))
        if command == "str_replace":
            _only(arguments, "command", "path", "old_str", "new_str")
            return Replace(path, _argument(arguments, "old_str"), _argument(arguments, "new_str"))
        raise InvalidAction(f"unknown editor command {command!r}")

    def write(self, action: Action, thought: str) -> dict:
        match action:
            case Submit():
                return _assistant(thought, "submit", {})
            case Replace(path, old, new):
                arguments = {"command": "str_replace", "path": path, "old_str": old, "new_str": new}
                return _assistant(thought, "str_replace_editor", arguments)
            case Run(command) if command.startswith("cat ") and ">" not in command:
                arguments = {"command": "view", "path": command.removeprefix("cat ")}
                return _assistant(thought, "str_replace_editor", arguments)
        return _assistant(thought, "bash", {"command": _shell(action)})

    def observation(self, exit_code: int, output: str) -> dict:
        text = _cut(output) or "no output\n"
        return {"role": "tool", "content": text if exit_code == 0 else f"exit {exit_code}\n{text}"}


class TextHarness:
    """Plain-text turns: one fenced command a turn, the output comes back as the user's next message."""

    name = "text"
    system = "Answer with one command a turn, or submit."
    tools = ()
    phrases = (system, "```bash\n", "\n```")
    _block = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)

    def action(self, completion: Completion) -> Action:
        if completion.text is None:
            raise InvalidAction("expected text with one command, found tool calls")
        commands = self._block.findall(completion.text)
        if len(commands) != 1:
            raise InvalidAction(f"expected exactly one bash block, found {len(commands)}")
        return Submit() if commands[0].strip() == "submit" else Run(commands[0])

    def write(self, action: Action, thought: str) -> dict:
        command = "submit" if isinstance(action, Submit) else _shell(action)
        return {"role": "assistant", "thinking": thought, "content": f"```bash\n{command}\n```"}

    def observation(self, exit_code: int, output: str) -> dict:
        return {"role": "user", "content": f"{_cut(output)}[exit {exit_code}]"}


HARNESSES: dict[str, Harness] = {h.name: h for h in (BashHarness(), EditorHarness(), TextHarness())}
