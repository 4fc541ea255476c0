import pytest

from north_jax.chat import FORMAT_PHRASES, ChatFormat, Tokenizer, tool_phrases, train_tokenizer

TOOLS = [
    {
        "name": "bash",
        "description": 'Runs a command, e.g. "ls".\nOutput is bounded.',
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
    {"name": "submit", "description": "Ends the task.", "parameters": {"type": "object", "properties": {}}},
]
TEXTS = [
    "List the files in /srv/data and write the number of lines to report.txt, then submit.\n",
    'def total(values):\n    """Sum of the values."""\n    return sum(values)\n\nprint("total", total([1, 2, 3]))\n',
    "ls -la src/data && cat src/data/report.txt | wc -l > out.txt\nThe file is in the report.\n",
] * 3


@pytest.fixture(scope="session")
def tools():
    return TOOLS


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, path, vocab_size=450, phrases=[*FORMAT_PHRASES, *tool_phrases(TOOLS)])
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def chat(tokenizer):
    return ChatFormat(tokenizer)
