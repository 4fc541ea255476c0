"""Tasks with their own verifiers: what a task is, and the seeded generator that makes them from templates."""

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
# English words of that form that instructions, commands or code use; no name may be one of them.
_ENGLISH = {"code", "file", "give", "line", "make", "mode", "move", "name", "note", "save", "take", "tell", "vote"}


@dataclasses.dataclass(frozen=True)
class Run:
    """Run a shell command in the work directory."""

    command: str


@dataclasses.dataclass(frozen=True)
class Replace:
    """Replace the one occurrence of `old` in the file `path` by `new`."""

    path: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the scripted expert: a short reasoning and an action. A `mistake` is shown but never trained on.

    slip: for a replacement, a plausible new text that the tests refuse.
    """

    thought: str
    action: Run | Replace
    mistake: bool = False
    slip: str | None = None


def replacement(path: str, old: str, new: str, slip: str | None = None) -> Step:
    """The step that replaces `old`, found once in the file `path`, by `new`."""
    return Step(f"{old} must be {new} in {path}", Replace(path, old, new), slip=slip)


@dataclasses.dataclass(frozen=True)
class Task:
    """A goal in words, the files it starts from, and the verifier that decides.

    verifier_files are laid beside, never inside, the work directory; `verifier` is a shell command run in the work
    directory with VERIFIER_DIR set, exit code 0 = solved. `solution` is the expert's, without the final submit.
    """

    id: str
    family: str  # "terminal" | "software"
    template: str
    instruction: str
    files: Mapping[str, str]
    verifier: str
    solution: tuple[Step, ...]
    verifier_files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def max_turns(self) -> int:
        """Step budget: the expert's steps, the submit, and two more."""
        return len(self.solution) + 3


class Words:
    """Open-vocabulary names: fresh two-syllable words, never the same twice in one task.

    The words of the two splits are disjoint, so a held-out task names things that no training task named.
    """

    def __init__(self, rng: random.Random, split: str):
        if split not in ("train", "heldout"):
            raise ValueError(f"unknown task split {split!r}; use 'train' or 'heldout'")
        self.rng = rng
        self._heldout = split == "heldout"
        self._used: set[str] = set()

    def __call__(self) -> str:
        while True:
            word = "".join(self.rng.choice(_CONSONANTS) + self.rng.choice(_VOWELS) for _ in range(2))
            # A fixed fifth of all words belongs to the held-out split.
            heldout = (sum(map(ord, word[::2])) * 7 + sum(map(ord, word[1::2])) * 3) % 5 == 0
            # Modules are named by these words, and a task's module must not be hidden by one of Python's own.
            if heldout is self._heldout and word not in self._used | _ENGLISH | sys.stdlib_module_names:
                self._used.add(word)
                return word

    def many(self, n: int) -> list[str]:
        return [self() for _ in range(n)]

    def lines(self, n: int) -> str:
        """A text of n one-word lines."""
        return "".join(f"{word}\n" for word in self.many(n))


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a template fills in; the generator adds id, family and template name."""

    instruction: str
    files: Mapping[str, str]
    verifier: str
    solution: tuple[Step, ...]
    verifier_files: Mapping[str, str] = dataclasses.field(default_factory=dict)


Template = Callable[[Words], Draft]
TEMPLATES: dict[str, tuple[str, Template]] = {}


def template(family: str) -> Callable[[Template], Template]:
    """Registers a template under its function name."""

    def register(fn: Template) -> Template:
        if fn.__name__ in TEMPLATES:
            raise ValueError(f"task template {fn.__name__!r} is defined twice; rename one of them")
        TEMPLATES[fn.__name__] = (family, fn)
        return fn

    return register


def make_task(name: str, index: int, *, split: str, seed: int) -> Task:
    """The index-th task of a template: a pure function of (name, index, split, seed)."""
    if name not in TEMPLATES:
        raise ValueError(f"unknown task template {name!r}; known: {', '.join(sorted(TEMPLATES))}")
    family, fn = TEMPLATES[name]
    words = Words(random.Random(f"{seed}/{split}/{name}/{index}"), split)
    draft = fn(words)
    return Task(
        id=f"{split}-{name}-{index}",
        family=family,
        template=name,
        instruction=draft.instruction,
        files=draft.files,
        verifier=draft.verifier,
        verifier_files=draft.verifier_files,
        solution=draft.solution,
    )


def task_from_id(task_id: str, *, seed: int) -> Task:
    """The task that an id of `make_task` names."""
    split, name, index = task_id.split("-")
    return make_task(name, int(index), split=split, seed=seed)


def task_stream(weights: Mapping[str, float], *, split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """An endless, seeded stream of tasks; the n-th depends on n alone, so a stream can be resumed at any `start`."""
    names = list(weights)
    number = start
    while True:
        rng = random.Random(f"{seed}/stream/{split}/{number}")
        name = rng.choices(names, weights=[weights[n] for n in names])[0]
        yield make_task(name, number, split=split, seed=seed)
        number += 1


def task_set(names: Sequence[str], per_template: int, *, split: str, seed: int) -> list[Task]:
    """per_template tasks of every named template, template by template."""
    return [make_task(name, i, split=split, seed=seed) for name in names for i in range(per_template)]
