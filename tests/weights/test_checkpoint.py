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
from train_tiny import FourParameters

from north_jax.parallel import make_mesh
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import init_state
from north_jax.weights.checkpoint import CheckpointError, Checkpoints

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


OPTIMIZERS = {
    "float32": {},
    "8 bits": {"optimizer": "muon", "moments": "int8", "param_dtype": "bfloat16", "rounding": "stochastic"},
}


def bits(array):
    """The array, or the integers of a random key, on the host."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


@pytest.fixture(scope="module", params=OPTIMIZERS, ids=OPTIMIZERS.keys())
def saved_on_eight(request, tmp_path_factory):
    """A train state of random bits saved on a mesh of 8: its optimizer, the folder, and the arrays by name."""
    optimizer = make_optimizer(make_schedule(1e-2, 10), **OPTIMIZERS[request.param])
    state = init_state(FourParameters(), optimizer, make_mesh(fsdp=2, expert=2, tensor=2))
    random = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(7), leaf.sharding)
        values = random.integers(0, 100, leaf.shape) if leaf.dtype.kind in "iu" else random.normal(size=leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    state = jax.tree.map(fill, state)
    folder = tmp_path_factory.mktemp("eight")
    checkpoints = Checkpoints(folder)
    checkpoints.save(4, state, {"iterator": {"next_index": 4}})
    checkpoints.close()
    types = {str(x.dtype) for x in jax.tree.leaves(state)}
    assert types >= ({"int8", "uint8", "bfloat16", "key<fry>"} if OPTIMIZERS[request.param] else {"float32", "int32"})
    return optimizer, folder, [bits(x) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 4, "tensor": 2}, {"data": 8}, {"fsdp": 2, "expert": 2}, {"expert": 4}, {"tensor": 2}, {}],
    ids=str,
)
def test_a_train_state_moves_to_another_mesh_bit_for_bit(saved_on_eight, sizes):
    optimizer, folder, expected = saved_on_eight
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    template = init_state(FourParameters(seed=1), optimizer, make_mesh(**sizes, devices=devices))
    checkpoints = Checkpoints(folder)
    step, restored, extra = checkpoints.restore_latest(template)
    checkpoints.close()
    assert step == 4 and extra == {"iterator": {"next_index": 4}}
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    for got, want, like in zip(jax.tree.leaves(restored), expected, jax.tree.leaves(template), strict=True):
        assert got.dtype == like.dtype and got.sharding.is_equivalent_to(like.sharding, like.ndim)
        np.testing.assert_array_equal(bits(got), want)


def every_type(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "bfloat16": jax.random.normal(keys[0], (8, 16), jnp.bfloat16),
        "float32": jax.random.normal(keys[1], (8, 16)),
        "int32": jnp.int32(seed),
        "int8": jnp.arange(-16, 16, dtype=jnp.int8).reshape(8, 4),
        "key": keys[2],
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 4),
        "uint8": jnp.arange(32, dtype=jnp.uint8),
    }


@pytest.mark.parametrize("name", every_type(0))
def test_a_bit_that_changed_unnoticed_by_the_storage_is_noticed(name, tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, every_type(step), {})
    checkpoints.wait()
    read = checkpoints._manager.restore

    def wrong(step, args):
        items = read(step, args=args)
        if step == 2 and "state" in items.keys():  # noqa: SIM118 - not a dict
            array = np.array(items["state"][name])
            array.reshape(-1)[-1:].view(np.uint8)[0] ^= 1
            items["state"][name] = jnp.asarray(array)
        return items

    checkpoints._manager.restore = wrong
    # A template may be shapes alone.
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), every_type(0))
    step, restored, _ = checkpoints.restore_latest(template)
    checkpoints.close()
    assert step == 1 and f"the checksum of {name} does not match" in capfd.readouterr().err
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(every_type(1)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_was_asked(keep, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 6):
        checkpoints.save(step, state(step), {})
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(6 - keep, 6))


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


@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_damage_to_any_file_ends_in_a_whole_checkpoint(saved, harm, capfd):
    whole = saved.with_name("whole")
    saved.rename(whole)
    files = [path.relative_to(whole) for path in (whole / "20").rglob("*") if path.is_file() and path.stat().st_size]
    taken = []
    for file in files:
        shutil.copytree(whole, saved)
        harm(saved / file)
        checkpoints = Checkpoints(saved)
        step, restored, extra = checkpoints.restore_latest(state(0))
        checkpoints.close()
        assert same(restored, state(step)) and extra["iterator"] == {"next_index": step}, file
        taken.append(step)
        shutil.rmtree(saved)
    assert set(taken) == {10, 20} and len(files) > 5  # some files are notes that nobody reads
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
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from test_checkpoint import Checkpoints, same, state
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
