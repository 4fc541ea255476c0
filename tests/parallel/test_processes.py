"""A run of two processes with four devices each against one process: a train step, checkpoints, a whole SFT run."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path
from side_by_side import run_together
from two_processes import MESHES, arrays, begin, step

from north_jax.model import blocks
from north_jax.parallel import make_mesh, processes
from north_jax.train.metrics import read_metrics
from north_jax.weights import hf
from north_jax.weights.checkpoint import Checkpoints

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("a:1", "2", ""), "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES set without JAX_PROCESS_ID; set all three"),
        (("", "2", "1"), "JAX_NUM_PROCESSES and JAX_PROCESS_ID set without JAX_COORDINATOR_ADDRESS"),
        (("a:1", "2", "2"), "JAX_PROCESS_ID is '2' of JAX_NUM_PROCESSES '2'; ids go from 0"),
        (("host", "2", "0"), "JAX_COORDINATOR_ADDRESS is 'host'; it must be HOST:PORT"),
    ],
)
def test_a_process_that_cannot_know_the_others_says_so(monkeypatch, given, sentence):
    for name, value in zip(processes.VARIABLES, given, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        processes.join()


@pytest.fixture(scope="module")
def one_device():
    jax.config.update("jax_disable_most_optimizations", True)
    state, metrics = step(make_mesh(devices=jax.devices()[:1]))
    jax.config.update("jax_disable_most_optimizations", False)
    return arrays(state), metrics


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes left of the steps of `two_processes.py`, after one process has written "by one"."""
    folder = tmp_path_factory.mktemp("together")
    checkpoints = Checkpoints(folder / "by one")
    checkpoints.save(7, begin(make_mesh(data=2, expert=4)), {"by": "one"})
    checkpoints.close()
    codes, said = run_together([str(HERE / "two_processes.py"), str(folder)])
    assert codes == [0, 0], "\n".join(said)
    return folder


@pytest.mark.parametrize("name", MESHES)
def test_a_step_is_that_of_one_device(one_device, together, name):
    """Loss and gradient (the first moments are a tenth of it) to 1e-5, and what the optimizer made of them."""
    expected, metrics = one_device
    found = dict(np.load(together / f"{name}.npz"))
    for key, value in metrics.items():
        np.testing.assert_allclose(found.pop(key), value, rtol=1e-5, err_msg=key)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        largest = np.abs(value).max()
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-5 * largest, err_msg=key)


@pytest.mark.parametrize("name", MESHES)
def test_one_process_restores_what_two_wrote_in_another_mesh(together, name):
    checkpoints = Checkpoints(together / name)
    number, state, extra = checkpoints.restore_latest(begin(make_mesh(fsdp=4, tensor=2), seed=1))
    checkpoints.close()
    assert (number, extra) == (1, {"mesh": MESHES[name]})
    same(arrays(state), np.load(together / f"{name}.npz"))


def test_two_processes_restore_what_one_wrote_in_another_mesh(together):
    same(arrays(begin(make_mesh(devices=jax.devices()[:1]))), np.load(together / "read by two.npz"))


def same(expected, found):
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("name", MESHES)
def test_two_processes_export_what_they_hold(together, name):
    exported = nnx.state(blocks.stack(hf.load(together / f"{name}.model")), nnx.Param)
    saved = np.load(together / f"{name}.npz")
    same({f".params{keystr(path)}": leaf for path, leaf in tree_leaves_with_path(exported)}, saved)


def train(workdir, stop=""):
    command = ["-m", "north_jax.main", f"--config={HERE / 'sft_job.py'}", f"--workdir={workdir}", "--distributed"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled")}
    return run_together(command, devices=2, environment={"STOP": stop, **cache})


def numbers(workdir):
    timed = ("time", "step_seconds", "tokens_per_second", "compile_seconds", "tflops", "mfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(workdir / "sft/metrics.jsonl")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(workdir, output of both processes) of a run from the command line."""
    workdir = tmp_path_factory.getbasetemp() / "straight"
    codes, said = train(workdir)
    assert codes == [0, 0], "\n".join(said)
    return workdir, said


def test_the_first_process_writes_every_file_once(straight):
    workdir, said = straight
    lines = read_metrics(workdir / "sft" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)) and len(lines) > 8
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert ["SFT stage 1/1" in text for text in said] == [True, False]
    first, second = (json.loads(text.split("WRITTEN ")[1].splitlines()[0]) for text in said)
    assert {str(workdir / "config.json"), str(workdir / "sft" / "metrics.jsonl")} < set(first)
    assert not [path for path in second if not path.startswith(str(workdir / "sft" / "checkpoints"))]
    assert not [path for path in second if path in first and pathlib.Path(path).is_file()]
    assert sorted(path.name for path in workdir.iterdir()) == ["config.json", "model", "sft"]
    hf.load(workdir / "model")


def test_a_run_told_to_stop_goes_on_to_the_same_numbers(straight):
    """A SIGTERM for the second process, in its fifth step: both stop after the sixth, and say so."""
    workdir = straight[0].with_name("stopped")
    codes, said = train(workdir, stop="1:5")
    assert codes == [130, 130], "\n".join(said)
    assert all("interrupted; the same command goes on from here" in text for text in said)
    assert [path.name for path in (workdir / "sft" / "checkpoints").iterdir()] == ["6"]
    assert [line["step"] for line in numbers(workdir)] == list(range(1, 7))
    codes, said = train(workdir)
    assert codes == [0, 0], "\n".join(said)
    assert numbers(workdir) == numbers(straight[0])
    for path in (straight[0] / "model").glob("*.safetensors"):
        assert path.read_bytes() == (workdir / "model" / path.name).read_bytes()
