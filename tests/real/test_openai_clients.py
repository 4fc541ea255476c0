"""Real clients on the wire: the openai package, mini-swe-agent and OpenCode complete a task against our server.

One part is scripted: which token the model draws next (scripted_engine.py), since a model of a size that runs here
would not solve anything. The clients, the HTTP server, the chat template, the tokenizer, the parser and the commands
that the clients run are real. Each client lives in an environment of its own under .venv-clients.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from scripted_engine import ScriptedEngine, serving

from north_jax.chat import ChatFormat, Tokenizer
from north_jax.weights import hf

ROOT = pathlib.Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients"
# litellm newer than 1.104 needs a package that it does not ask for.
PYTHON_CLIENTS = {"openai": ["openai==2.8.0"], "mini": ["mini-swe-agent==2.4.6", "litellm==1.98.0"]}
OPENCODE = "opencode-ai@1.18.33"


def run(command, **options):
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def installed(name: str, program: str, commands: list[list]) -> pathlib.Path:
    """The program of a client, installed by the commands once; skips where that is not possible."""
    folder = CLIENTS / name
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in commands:
            if shutil.which(command[0]) is None:
                pytest.skip(f"{name} cannot be installed: there is no {command[0]} on this machine")
            done = run(command, cwd=folder)
            if done.returncode:
                pytest.skip(f"{name} cannot be installed: {command[0]} says {done.stderr.strip().splitlines()[-1:]}")
        (folder / "ready").touch()
    return folder / program


def python_client(name: str, program: str) -> pathlib.Path:
    pip = [CLIENTS / name / "bin" / "python", "-m", "pip", "install", "--quiet", *PYTHON_CLIENTS[name]]
    return installed(name, program, [[sys.executable, "-m", "venv", "."], list(map(str, pip))])


@pytest.fixture(scope="module")
def chat(untrained):
    return ChatFormat(Tokenizer.load(untrained))


class Conversation:
    """The model's turns in order; which one is next is told by the tool results in the prompt.

    A prompt without tools asks for a title, as OpenCode does beside the task: it gets one.
    """

    def __init__(self, chat: ChatFormat, turns: list[dict], chatty: bool):
        self.chat, self.prompts = chat, []
        self._chatty = chatty  # the task itself may come without tools
        said = [{"role": "assistant", **turn} for turn in turns]
        # As a model of this format writes them: calls are numbered over the whole conversation.
        self._turns = [self._ids(said[:i], turn) for i, turn in enumerate(said)]
        self._title = self._ids([], {"role": "assistant", "content": "A task"})

    def _ids(self, before: list[dict], turn: dict) -> list[int]:
        start = len(self.chat.render(before, generation_prompt=True).ids)
        return self.chat.render([*before, turn]).ids[start:]

    def __call__(self, prompt: list[int]) -> list[int]:
        if "# Available Tools\n```json\n[\n\n]" in self.chat.tokenizer.decode(prompt) and not self._chatty:
            return self._title[prompt[-1] == self.chat.tokenizer.end_thinking :]  # its reasoning may be closed
        self.prompts.append(prompt)
        return self._turns[min(prompt.count(self.chat.tokenizer.start_tool_result), len(self._turns) - 1)]

    def assert_token_exact(self):
        """Every prompt goes on where the one before and its completion ended: nothing was lost or spelt anew."""
        for number, (before, after) in enumerate(zip(self.prompts, self.prompts[1:], strict=False)):
            said = before + self._turns[number]
            assert after[: len(said)] == said


def served(chat, untrained, turns, *, chatty=False, **options):
    conversation = Conversation(chat, turns, chatty)
    engine = ScriptedEngine(hf.load(untrained).config, conversation, context=400_000, chunk=8)
    return conversation, serving(engine, untrained, tokenizer=chat.tokenizer, **options)


def bash(*commands, thinking=""):
    return {"thinking": thinking, "tool_calls": [{"name": "bash", "arguments": {"command": c}} for c in commands]}


def test_openai_package(chat, untrained):
    python = python_client("openai", "bin/python")
    turns = [bash("ls | wc -l", thinking="I count them."), {"content": "Three files."}]
    _, server = served(chat, untrained, turns, chatty=True, api_key="s3cret")
    with server as (url, _, _):
        done = run([python, pathlib.Path(__file__).with_name("openai_session.py"), url])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done with 2.8.0")


def test_mini_swe_agent(chat, untrained, tmp_path):
    mini = python_client("mini", "bin/mini")
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat greeting.txt"
    turns = [
        bash("printf 'héllo <there>\\n' > greeting.txt", thinking="I write the file."),
        bash("cat greeting.txt", "wc -l < greeting.txt", thinking="I look at it twice."),
        bash(submit, thinking="Done."),
    ]
    conversation, server = served(chat, untrained, turns)
    work, out = tmp_path / "work", tmp_path / "run.traj.json"
    work.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "none",
    }
    with server as (url, _, _):
        settings = ["mini.yaml", "model.model_name=openai/north", f"model.model_kwargs.api_base={url}/v1"]
        command = [mini, "-y", "--exit-immediately", "-t", "Write a greeting.", "-o", out]
        done = run(command + [word for s in settings for word in ("-c", s)], cwd=work, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "greeting.txt").read_text() == "héllo <there>\n"
    about = json.loads(out.read_text())["info"]
    assert (about["exit_status"], about["submission"]) == ("Submitted", "héllo <there>\n")
    assert len(conversation.prompts) == 3
    conversation.assert_token_exact()


def test_opencode(chat, untrained, tmp_path):
    npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", OPENCODE]
    # Its install script, which is not run, would only choose one of the programs: "baseline" runs on every processor.
    program = sorted(installed("opencode", "node_modules", [npm]).glob("opencode-*-*/bin/opencode"))[-1]
    work = tmp_path / "work"
    work.mkdir()
    file = str(work / "greeting.txt")
    turns = [
        {"thinking": "New file.", "tool_calls": [call("write", filePath=file, content="hello\nworld\n")]},
        {"thinking": "Better.", "tool_calls": [call("edit", filePath=file, oldString="hello", newString="héllo")]},
        {"thinking": "Check.", "tool_calls": [call("bash", command="cat greeting.txt"), call("read", filePath=file)]},
        {"thinking": "", "content": "The greeting is written."},
    ]
    conversation, server = served(chat, untrained, turns)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    with server as (url, _, _):
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {"north": {"tool_call": True, "reasoning": True, "limit": {"context": 200000, "output": 8192}}},
        }
        (work / "opencode.json").write_text(json.dumps({"provider": {"local": provider}}))
        command = [program, "run", "--format", "json", "--auto", "-m", "local/north", "Write a greeting."]
        done = run(command, cwd=work, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "greeting.txt").read_text() == "héllo\nworld\n"
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    tools = {event["part"]["tool"]: event["part"]["state"] for event in events if event["type"] == "tool_use"}
    # The last two are of one turn, and run at the same time.
    assert list(tools)[:2] == ["write", "edit"] and set(tools) == {"write", "edit", "bash", "read"}
    assert {state["status"] for state in tools.values()} == {"completed"}
    assert tools["bash"]["output"] == "héllo\nworld\n"
    assert [e["part"]["text"] for e in events if e["type"] == "text"] == ["The greeting is written."]
    assert len(conversation.prompts) == 4
    conversation.assert_token_exact()


def call(name: str, **arguments) -> dict:
    return {"name": name, "arguments": arguments}
