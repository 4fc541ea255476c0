"""Terminal tasks: a shell, a goal in words, a check script. One function a template; see `tasks.Draft`.

Checks compare the whole outcome (contents, and that nothing else was lost), so that no half-done state passes.
"""

from north_jax.envs.tasks import Draft, Run, Step, Words, template

# Verifier files: `want_*` are compared byte for byte with files of the work directory.
_SAME = 'cmp -s "$VERIFIER_DIR/want" {path}'


def _draft(
    words: Words,
    phrasings: list[str],
    files: dict[str, str],
    thought: str,
    command: str | list[str],
    verifier: str,
    want: str | None = None,
) -> Draft:
    commands = [command] if isinstance(command, str) else command
    return Draft(
        instruction=words.rng.choice(phrasings),
        files=files,
        verifier=verifier,
        verifier_files={} if want is None else {"want": want},
        solution=tuple(Step(thought, Run(c)) for c in commands),
    )


def _produces(words: Words, phrasings, files, thought, command, path, want) -> Draft:
    """A task whose outcome is one file, all the given files kept as they are (unless it is one of them)."""
    kept = " && ".join(f"test -e {name}" for name in files if name != path)
    verifier = _SAME.format(path=path) + (f" && {kept}" if kept else "")
    return _draft(words, phrasings, files, thought, command, verifier, want)


@template("terminal")
def create_file(w: Words) -> Draft:
    a, b = w.many(2)
    return _produces(
        w,
        [f"Create the file {a}.txt with the line {b}.", f"Write the word {b} into a new file {a}.txt."],
        {},
        f"write {b} into {a}.txt",
        f"echo {b} > {a}.txt",
        f"{a}.txt",
        f"{b}\n",
    )


@template("terminal")
def append_line(w: Words) -> Draft:
    a, b = w.many(2)
    text = w.lines(w.rng.randint(1, 3))
    return _produces(
        w,
        [f"Add the line {b} at the end of {a}.txt.", f"Append {b} to {a}.txt."],
        {f"{a}.txt": text},
        f"append {b} to {a}.txt",
        f"echo {b} >> {a}.txt",
        f"{a}.txt",
        text + f"{b}\n",
    )


@template("terminal")
def delete_file(w: Words) -> Draft:
    a, b = w.many(2)
    files = {f"{a}.txt": w.lines(1), f"{b}.txt": w.lines(1)}
    return _draft(
        w,
        [f"Delete {a}.txt.", f"Remove the file {a}.txt, keep the rest."],
        files,
        f"delete {a}.txt",
        f"rm {a}.txt",
        f"test ! -e {a}.txt && test -e {b}.txt",
    )


@template("terminal")
def rename_file(w: Words) -> Draft:
    a, b = w.many(2)
    text = w.lines(1)
    return _draft(
        w,
        [f"Rename {a}.txt to {b}.txt.", f"Give the file {a}.txt the new name {b}.txt."],
        {f"{a}.txt": text},
        f"rename {a}.txt to {b}.txt",
        f"mv {a}.txt {b}.txt",
        f"test ! -e {a}.txt && " + _SAME.format(path=f"{b}.txt"),
        text,
    )


@template("terminal")
def copy_file(w: Words) -> Draft:
    a, b = w.many(2)
    text = w.lines(1)
    return _produces(
        w,
        [f"Copy {a}.txt to {b}.txt.", f"Make a copy of {a}.txt named {b}.txt."],
        {f"{a}.txt": text},
        f"copy {a}.txt to {b}.txt",
        f"cp {a}.txt {b}.txt",
        f"{b}.txt",
        text,
    )


@template("terminal")
def make_directory(w: Words) -> Draft:
    a, b = w.many(2)
    return _draft(
        w,
        [f"Make the directory {a}/{b}.", f"Create a directory {b} inside a new directory {a}."],
        {},
        f"make {a}/{b}",
        f"mkdir -p {a}/{b}",
        f"test -d {a}/{b}",
    )


@template("terminal")
def move_into(w: Words) -> Draft:
    a, d, other = w.many(3)
    text = w.lines(1)
    return _draft(
        w,
        [f"Move {a}.txt into the directory {d}.", f"Put {a}.txt into {d}."],
        {f"{a}.txt": text, f"{d}/{other}.txt": w.lines(1)},
        f"move {a}.txt into {d}",
        f"mv {a}.txt {d}/",
        f"test ! -e {a}.txt && " + _SAME.format(path=f"{d}/{a}.txt"),
        text,
    )


@template("terminal")
def first_line(w: Words) -> Draft:
    a, b = w.many(2)
    text = w.lines(w.rng.randint(2, 4))
    return _produces(
        w,
        [f"Write the first line of {a}.txt to {b}.txt.", f"Save the first line of {a}.txt as {b}.txt."],
        {f"{a}.txt": text},
        f"first line of {a}.txt to {b}.txt",
        f"head -n 1 {a}.txt > {b}.txt",
        f"{b}.txt",
        text.splitlines(True)[0],
    )


@template("terminal")
def sort_lines(w: Words) -> Draft:
    a, b = w.many(2)
    lines = w.many(w.rng.randint(3, 5))
    while lines == sorted(lines):
        w.rng.shuffle(lines)
    return _produces(
        w,
        [f"Sort the lines of {a}.txt into {b}.txt.", f"Write the lines of {a}.txt in order to {b}.txt."],
        {f"{a}.txt": "\n".join(lines) + "\n"},
        f"sort {a}.txt into {b}.txt",
        f"sort {a}.txt > {b}.txt",
        f"{b}.txt",
        "\n".join(sorted(lines)) + "\n",
    )


@template("terminal")
def follow_note(w: Words) -> Draft:
    a, b, n = w.many(3)
    return Draft(
        instruction=w.rng.choice([f"Do what the note in {n}.txt says.", f"Read {n}.txt and do what it asks."]),
        files={f"{n}.txt": f"write {b} into {a}.txt\n"},
        verifier=_SAME.format(path=f"{a}.txt"),
        verifier_files={"want": f"{b}\n"},
        solution=(
            Step(f"read {n}.txt", Run(f"cat {n}.txt")),
            Step(f"write {b} into {a}.txt", Run(f"echo {b} > {a}.txt")),
        ),
    )


@template("terminal")
def delete_named_in_note(w: Words) -> Draft:
    a, b, n = w.many(3)
    files = {f"{a}.txt": w.lines(1), f"{b}.txt": w.lines(1), f"{n}.txt": f"{a}.txt\n"}
    return Draft(
        instruction=w.rng.choice([f"Delete the file that {n}.txt names.", f"Remove the file named in {n}.txt."]),
        files=files,
        verifier=f"test ! -e {a}.txt && test -e {b}.txt && test -e {n}.txt",
        solution=(Step(f"read {n}.txt", Run(f"cat {n}.txt")), Step(f"delete {a}.txt", Run(f"rm {a}.txt"))),
    )


@template("terminal")
def count_lines(w: Words) -> Draft:
    a, b = w.many(2)
    n = w.rng.randint(2, 6)
    return _produces(
        w,
        [f"Write the number of lines of {a}.txt to {b}.txt.", f"Count the lines of {a}.txt, save it as {b}.txt."],
        {f"{a}.txt": w.lines(n)},
        f"count lines of {a}.txt into {b}.txt",
        f"wc -l < {a}.txt > {b}.txt",
        f"{b}.txt",
        f"{n}\n",
    )


@template("terminal")
def last_line(w: Words) -> Draft:
    a, b = w.many(2)
    text = w.lines(w.rng.randint(2, 4))
    return _produces(
        w,
        [f"Write the last line of {a}.txt to {b}.txt.", f"Save the last line of {a}.txt as {b}.txt."],
        {f"{a}.txt": text},
        f"last line of {a}.txt to {b}.txt",
        f"tail -n 1 {a}.txt > {b}.txt",
        f"{b}.txt",
        text.splitlines(True)[-1],
    )


@template("terminal")
def find_file(w: Words) -> Draft:
    key, out = w.many(2)
    names = w.many(3)
    files = {f"{name}.txt": w.lines(2) for name in names}
    hit = w.rng.choice(names)
    files[f"{hit}.txt"] += f"{key}\n"
    return _produces(
        w,
        [
            f"Write the name of the file with the word {key} to {out}.md.",
            f"Find the file with {key}, save its name as {out}.md.",
        ],
        files,
        f"search {key}, name into {out}.md",
        f"grep -l {key} *.txt > {out}.md",
        f"{out}.md",
        f"{hit}.txt\n",
    )


@template("terminal")
def drop_lines(w: Words) -> Draft:
    a, key = w.many(2)
    lines = w.many(3)
    lines.insert(w.rng.randint(0, 3), key)
    return _produces(
        w,
        [f"Delete the line {key} from {a}.txt.", f"Remove the line {key} of {a}.txt."],
        {f"{a}.txt": "\n".join(lines) + "\n"},
        f"delete line {key} of {a}.txt",
        f"sed -i /{key}/d {a}.txt",
        f"{a}.txt",
        "".join(f"{line}\n" for line in lines if line != key),
    )


@template("terminal")
def join_files(w: Words) -> Draft:
    a, b, c = w.many(3)
    first, second = w.lines(1), w.lines(1)
    return _produces(
        w,
        [f"Join {a}.txt and {b}.txt into {c}.txt.", f"Write {a}.txt and then {b}.txt to {c}.txt."],
        {f"{a}.txt": first, f"{b}.txt": second},
        f"join {a}.txt and {b}.txt into {c}.txt",
        f"cat {a}.txt {b}.txt > {c}.txt",
        f"{c}.txt",
        first + second,
    )


@template("terminal")
def count_word(w: Words) -> Draft:
    a, b, key = w.many(3)
    n = w.rng.randint(1, 4)
    lines = [*w.many(2), *[key] * n]
    w.rng.shuffle(lines)
    return _produces(
        w,
        [
            f"Write how many lines of {a}.txt have {key} to {b}.txt.",
            f"Count the lines with {key} in {a}.txt, save it as {b}.txt.",
        ],
        {f"{a}.txt": "\n".join(lines) + "\n"},
        f"count {key} in {a}.txt into {b}.txt",
        f"grep -c {key} {a}.txt > {b}.txt",
        f"{b}.txt",
        f"{n}\n",
    )


@template("terminal")
def make_executable(w: Words) -> Draft:
    a = w()
    return _draft(
        w,
        [f"Make {a}.sh executable.", f"Make it possible to run {a}.sh."],
        {f"{a}.sh": f"echo {w()}\n"},
        f"make {a}.sh executable",
        f"chmod +x {a}.sh",
        f"test -x {a}.sh",
    )


@template("terminal")
def copy_named_in_note(w: Words) -> Draft:
    a, b, n = w.many(3)
    text = w.lines(1)
    return Draft(
        instruction=w.rng.choice(
            [
                f"Copy the file that {n}.txt names to {b}.txt.",
                f"Make a copy named {b}.txt of the file named in {n}.txt.",
            ]
        ),
        files={f"{a}.txt": text, f"{n}.txt": f"{a}.txt\n"},
        verifier=f"test -e {a}.txt && " + _SAME.format(path=f"{b}.txt"),
        verifier_files={"want": text},
        solution=(
            Step(f"read {n}.txt", Run(f"cat {n}.txt")),
            Step(f"copy {a}.txt to {b}.txt", Run(f"cp {a}.txt {b}.txt")),
        ),
    )


@template("terminal")
def create_and_delete(w: Words) -> Draft:
    a, b, c = w.many(3)
    return Draft(
        instruction=f"Create the file {a}.txt with the line {b}. Then delete {c}.txt.",
        files={f"{c}.txt": w.lines(1)},
        verifier=f"test ! -e {c}.txt && " + _SAME.format(path=f"{a}.txt"),
        verifier_files={"want": f"{b}\n"},
        solution=(
            Step(f"write {b} into {a}.txt", Run(f"echo {b} > {a}.txt")),
            Step(f"delete {c}.txt", Run(f"rm {c}.txt")),
        ),
    )


@template("terminal")
def copy_and_append(w: Words) -> Draft:
    a, b, c = w.many(3)
    text = w.lines(1)
    return Draft(
        instruction=f"Copy {a}.txt to {b}.txt. Then append {c} to {b}.txt.",
        files={f"{a}.txt": text},
        verifier=_SAME.format(path=f"{b}.txt") + f' && test "$(cat {a}.txt)" = {text.strip()}',
        verifier_files={"want": f"{text}{c}\n"},
        solution=(
            Step(f"copy {a}.txt to {b}.txt", Run(f"cp {a}.txt {b}.txt")),
            Step(f"append {c} to {b}.txt", Run(f"echo {c} >> {b}.txt")),
        ),
    )


@template("terminal")
def rename_named_in_note(w: Words) -> Draft:
    a, b, n = w.many(3)
    text = w.lines(1)
    return Draft(
        instruction=f"Rename the file that {n}.txt names to {b}.txt.",
        files={f"{a}.txt": text, f"{n}.txt": f"{a}.txt\n"},
        verifier=f"test ! -e {a}.txt && " + _SAME.format(path=f"{b}.txt"),
        verifier_files={"want": text},
        solution=(
            Step(f"read {n}.txt", Run(f"cat {n}.txt")),
            Step(f"rename {a}.txt to {b}.txt", Run(f"mv {a}.txt {b}.txt")),
        ),
    )
