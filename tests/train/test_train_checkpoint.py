import gc
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from north_jax.parallel import make_mesh
from north_jax.train.checkpoint import CheckpointError, Checkpoints

# Orbax leaves coroutines behind when a read or write fails, which complain when they are collected: collect them here.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


def state(seed, width=64):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "params": [jax.random.normal(keys[0], (16, width)), jax.random.normal(keys[1], (8, 8), jnp.bfloat16)],
        "moments": (jax.random.normal(keys[2], (16, width)), jnp.zeros((4,))),
        "step": jnp.int32(seed),
    }


def same(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype, left, right))


@pytest.fixture
def saved(tmp_path):
    """Checkpoints 10 and 20 of three saves, the first of which `keep` has dropped."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 10, 20):
        checkpoints.save(step, state(step), {"stage": 0, "iterator": {"next_index": step}})
    checkpoints.close()
    return tmp_path / "checkpoints"


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_the_newest_comes_back_exactly_and_the_oldest_is_gone(saved):
    checkpoints = Checkpoints(saved)
    assert checkpoints.steps == [10, 20]
    step, restored, extra = checkpoints.restore_latest(state(0))
    assert step == 20 and same(restored, state(20)) and extra == {"stage": 0, "iterator": {"next_index": 20}}
    checkpoints.close()


def test_an_empty_directory_has_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.restore_latest(state(0)) is None
    checkpoints.close()


def test_a_save_is_of_the_moment_though_the_state_is_donated_at_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    current = state(1)
    expected = jax.tree.map(np.array, current)
    checkpoints.save(1, current, {})
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)(current))
    checkpoints.wait()
    _, restored, _ = checkpoints.restore_latest(state(0))
    assert same(restored, expected)
    checkpoints.close()


def test_another_device_layout_can_read_it(saved):
    mesh = make_mesh(fsdp=8)
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    template = jax.tree.map(lambda x: jax.device_put(x, split if x.ndim == 2 else everywhere), state(0))
    checkpoints = Checkpoints(saved)
    _, restored, _ = checkpoints.restore_latest(template)
    assert same(restored, state(20))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, template)))
    checkpoints.close()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def metadata(folder):
    return folder / "extra" / "metadata"


@pytest.mark.parametrize("find", [largest_file, metadata], ids=["arrays", "extra"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_damage_is_noticed_and_the_one_before_is_taken(saved, harm, find, capfd):
    harm(find(saved / "20"))
    checkpoints = Checkpoints(saved)
    step, restored, extra = checkpoints.restore_latest(state(0))
    assert step == 10 and same(restored, state(10)) and extra["iterator"] == {"next_index": 10}
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("checkpoint 20 in")]
    assert len(told) == 1 and told[0].endswith("continues from checkpoint 10")
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20.damaged"]
    checkpoints.save(20, state(21), {})  # the run comes by this step again
    checkpoints.wait()
    assert same(checkpoints.restore_latest(state(0))[1], state(21))
    checkpoints.close()


def test_any_flipped_bit_of_the_arrays_is_noticed(saved, capfd):
    target = largest_file(saved / "20")
    whole = target.read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(0, len(whole), 12):
        target.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << random.integers(8))]) + whole[place + 1 :])
        checkpoints = Checkpoints(saved)
        step, restored, _ = checkpoints.restore_latest(state(0))
        checkpoints.close()
        assert same(restored, state(step)), f"byte {place} of {len(whole)}"
        if step == 10:
            (saved / "20.damaged").rename(saved / "20")
    capfd.readouterr()


def test_when_all_are_damaged_none_is_touched(saved):
    for step in ("10", "20"):
        truncate(largest_file(saved / step))
    checkpoints = Checkpoints(saved)
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged"):
        checkpoints.restore_latest(state(0))
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20"]
    checkpoints.close()


def test_other_parameters_are_no_damage(saved):
    checkpoints = Checkpoints(saved)
    with pytest.raises(CheckpointError, match=r"written by another configuration: moments.0 is .*64.* there and .*32"):
        checkpoints.restore_latest(state(0, width=32))
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20"]
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_full_disk_is_one_sentence_and_leaves_the_last_good_one(small_disk):
    folder = small_disk / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    with pytest.raises(CheckpointError) as error:
        checkpoints.save(2, state(2), {})
    needed = sum(x.nbytes for x in jax.tree.leaves(state(2)))
    assert f"checkpoint 2 in {folder} needs {needed:,} bytes where 4,096 are free" in str(error.value)
    assert str(error.value).endswith("(checkpoint 1 is untouched)") and "\n" not in str(error.value)
    assert same(checkpoints.restore_latest(state(0))[1], state(1))

    # Room for the arrays but not for what goes with them: noticed by the writer in the background.
    os.truncate(filler, filler.stat().st_size - 3 * 4096)
    with pytest.raises(CheckpointError, match=r"could not be written .* make room there"):
        checkpoints.save(2, state(2), {})
        checkpoints.wait()
    filler.unlink()
    assert same(checkpoints.restore_latest(state(0))[1], state(1))
    checkpoints.save(2, state(2), {})
    checkpoints.wait()
    assert checkpoints.restore_latest(state(0))[0] == 2
    checkpoints.close()


def test_a_write_that_fails_in_the_background_is_one_sentence(tmp_path):
    # A limit on the size of a file stands in for a quota; in a process of its own, as the limit is for all of it.
    program = f"""
        import resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_train_checkpoint import Checkpoints, same, state
        checkpoints = Checkpoints({str(tmp_path / "c")!r})
        checkpoints.save(1, state(1), {{}})
        checkpoints.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, state(2, width=1024), {{}})
            checkpoints.wait()
        except Exception as error:
            print(type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        step, restored, _ = checkpoints.restore_latest(state(0))
        print(step, same(restored, state(1)))
        checkpoints.save(2, state(2), {{}})
        checkpoints.close()
        print(checkpoints.steps)
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"CheckpointError checkpoint 2 in {tmp_path / 'c'} could not be written ("), done
    assert lines[0].endswith("(checkpoint 1 is untouched)")
    assert lines[1:] == ["1 True", "[1, 2]"]
