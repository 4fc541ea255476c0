"""Software tasks: a small Python repository with a bug, an issue text, and unit tests that fail before and pass after.

The repository's own test file is there for the agent to run. The verifier has its own: it calls the repository's code
in a child process that knows the calls but not the values they must give, so that code which merely ends the process,
or patches the tests, passes nothing.
"""

from north_jax.envs.tasks import Draft, Run, Step, Words, replacement, template

# A failing test says one line: the context of a small model has no room for tracebacks.
_TESTS = """\
import sys

sys.tracebacklimit = 0
from MODULE import *


def check(call, value, want):
    assert value == want, f"{call} is {value}, not {want}"


TESTS

for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
print("ok")
"""

# Deletes itself before the agent's code runs: what is expected is then in this process's memory alone.
_CHECK = """
import os, sys
os.unlink(__file__)
want = {want!r}
read, write = os.pipe()
if os.fork() == 0:
    os.dup2(write, 1)
    code = "import os, sys; sys.path.insert(0, os.getcwd()); from {module} import *; print([{calls}])"
    os.execv(sys.executable, [sys.executable, "-S", "-c", code])
os.close(write)
with open(read) as out:
    got = out.read().strip()
sys.exit(os.wait()[1] != 0 or got != want)
"""


def _draft(
    w: Words,
    issue: list[str],
    module: str,
    source: str,
    checks: list[tuple[str, object]],
    old: str,
    new: str,
    slip: str,
) -> Draft:
    """The repository {module}.py + test.py; `checks` are (call, value).

    Replacing `old` by `new` mends the source; replacing it by `slip` does not.
    """
    if source.count(old) != 1:
        raise ValueError(f"the text to replace, {old!r}, must be in the source exactly once")
    tests = "\n\n".join(
        f"def test_{i}():\n    check({call!r}, {call}, {value!r})\n" for i, (call, value) in enumerate(checks)
    )
    path = f"{module}.py"
    calls = ", ".join(call for call, _ in checks)
    check = _CHECK.format(want=repr([value for _, value in checks]), module=module, calls=calls)
    return Draft(
        instruction=w.rng.choice(issue),
        files={path: source, "test.py": _TESTS.replace("MODULE", module).replace("TESTS", tests)},
        verifier='python3 -S "$VERIFIER_DIR/check.py"',
        verifier_files={"check.py": check},
        solution=(
            Step(f"read {path}", Run(f"cat {path}")),
            replacement(path, old, new, slip),
            Step("run the tests", Run("python3 test.py")),
        ),
    )


@template("software")
def wrong_operator(w: Words) -> Draft:
    m, f, p, q = w.many(4)
    right, wrong, slip = w.rng.sample(["+", "-", "*"], 3)
    verb = {"+": "add", "-": "subtract", "*": "multiply"}[right]
    return _draft(
        w,
        [f"In {m}.py {f} must {verb} its arguments.", f"Bug in {m}.py: {f} does not {verb}."],
        m,
        f"def {f}({p}, {q}):\n    return {p} {wrong} {q}\n",
        [(f"{f}({a}, {b})", {"+": a + b, "-": a - b, "*": a * b}[right]) for a, b in ((7, 3), (5, 4))],
        wrong,
        right,
        slip,
    )


@template("software")
def wrong_constant(w: Words) -> Draft:
    m, f, p, right, wrong, slip = w.many(6)
    return _draft(
        w,
        [f"In {m}.py {f} must tell if {p} is {right}.", f"Bug in {m}.py: {f} does not tell if {p} is {right}."],
        m,
        f"def {f}({p}):\n    return {p} == '{wrong}'\n",
        [(f"{f}('{word}')", word == right) for word in (right, wrong)],
        wrong,
        right,
        slip,
    )


@template("software")
def wrong_text(w: Words) -> Draft:
    m, f, right, wrong, slip = w.many(5)
    return _draft(
        w,
        [f"In {m}.py {f} must return {right}.", f"Bug in {m}.py: {f} does not return {right}."],
        m,
        f"def {f}():\n    return '{wrong}'\n",
        [(f"{f}()", right)],
        wrong,
        right,
        slip,
    )


@template("software")
def wrong_argument(w: Words) -> Draft:
    m, f, p, q = w.many(4)
    return _draft(
        w,
        [f"In {m}.py {f} must return {p}.", f"Bug in {m}.py: {f} does not return {p}."],
        m,
        f"def {f}({p}, {q}):\n    return {q}\n",
        [(f"{f}(1, 2)", 1), (f"{f}(4, 3)", 4)],
        f"return {q}",
        f"return {p}",
        f"return {p} + {q}",
    )


@template("software")
def wrong_comparison(w: Words) -> Draft:
    m, f, p, q = w.many(4)
    right, wrong = w.rng.choice(["><", "<>"])
    word = {">": "larger", "<": "smaller"}[right]
    return _draft(
        w,
        [f"In {m}.py {f} must tell if {p} is {word}.", f"Bug in {m}.py: {f} does not tell if {p} is {word}."],
        m,
        f"def {f}({p}, {q}):\n    return {p} {wrong} {q}\n",
        [(f"{f}(2, 1)", right == ">"), (f"{f}(1, 2)", right == "<")],
        wrong,
        right,
        "==",
    )


@template("software")
def wrong_key(w: Words) -> Draft:
    m, f, p, right, wrong, slip = w.many(6)
    return _draft(
        w,
        [f"In {m}.py {f} must return the item {right}.", f"Bug in {m}.py: {f} does not return the item {right}."],
        m,
        f"def {f}({p}):\n    return {p}.get('{wrong}')\n",
        [(f"{f}({{'{right}': {n}}})", n) for n in (4, 7)],
        wrong,
        right,
        slip,
    )


@template("software")
def missing_return(w: Words) -> Draft:
    m, f, p = w.many(3)
    return _draft(
        w,
        [f"In {m}.py {f} returns nothing.", f"Bug in {m}.py: {f} has no return."],
        m,
        f"def {f}({p}):\n    len({p})\n",
        [(f"{f}('{word}')", len(word)) for word in ("a", "abc")],
        "len(",
        "return len(",
        "print(",
    )


@template("software")
def wrong_default(w: Words) -> Draft:
    m, f, p, right, wrong, slip = w.many(6)
    return _draft(
        w,
        [f"In {m}.py the default of {p} must be {right}.", f"Bug in {m}.py: the default of {p} is not {right}."],
        m,
        f"def {f}({p}='{wrong}'):\n    return {p}\n",
        [(f"{f}()", right), (f"{f}('a')", "a")],
        wrong,
        right,
        slip,
    )
