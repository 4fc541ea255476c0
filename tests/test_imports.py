"""The direction of imports: towards the model, never back."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

# Room -> the rooms it may import, besides itself. The rooms of the house, from the model outwards.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "model": {"pallas_kernels", "parallel"},
    "parallel": set(),
    "weights": {"model", "parallel"},
    "chat": set(),
    "data": set(),
    "train": {"model", "pallas_kernels", "parallel", "weights", "data"},
    "envs": set(),
    "sampler": {"chat", "model", "parallel", "weights"},
    "agents": {"chat", "envs", "sampler"},
    "evals": {"agents", "chat", "data", "envs", "sampler", "weights"},
    "rl": {"agents", "chat", "data", "envs", "model", "parallel", "sampler", "train", "weights"},
}


def _room(path: pathlib.Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "pallas_kernels":
        return parts[0]
    return parts[1] if len(parts) > 2 else None  # files beside the rooms put them together


def _imported_rooms(path: pathlib.Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    rooms = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "pallas_kernels":
            rooms.add(parts[0])
        elif parts[0] == "north_jax" and len(parts) > 1:
            rooms.add(parts[1])
    return rooms


def test_imports_point_towards_the_model():
    wrong = []
    files = [*(ROOT / "north_jax").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]
    assert len(files) > 50
    for path in files:
        room = _room(path)
        if room is None:
            continue
        for other in _imported_rooms(path) - {room} - MAY_IMPORT[room]:
            wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not wrong, wrong


def test_every_room_is_listed():
    rooms = {p.name for p in (ROOT / "north_jax").iterdir() if (p / "__init__.py").exists()}
    assert rooms | {"pallas_kernels"} == set(MAY_IMPORT)


def test_the_permitted_arrows_have_no_circle():
    left = dict(MAY_IMPORT)
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"circle among {sorted(left)}"
        for room in free:
            del left[room]


def test_training_leaves_the_compilers_settings_alone():
    """`pallas_kernels.aot` tells libtpu that there is no TPU; what runs on one must not import it."""
    code = "import sys, north_jax.main, north_jax.rl.learner; assert 'pallas_kernels.aot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
