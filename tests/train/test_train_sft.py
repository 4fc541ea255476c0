import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from train_tiny import tiny_corpus, tiny_model

from north_jax.data import BatchIterator
from north_jax.parallel import make_mesh
from north_jax.train import expert_load
from north_jax.train.metrics import METRICS, read_metrics
from north_jax.train.sft import run_sft, sft_config, stage_config, stage_steps
from north_jax.weights.checkpoint import CheckpointError


def settings(**values):
    stages = (
        stage_config(row_length=16, batch_rows=8, epochs=2.0, lr=2e-2, warmup=2),
        stage_config(row_length=32, batch_rows=4, epochs=1.5, lr=5e-3, warmup=1, decay="cosine"),
    )
    return sft_config(stages=stages, save_every=3, **values)


def data():
    return [tiny_corpus(16), tiny_corpus(32)]


def run(workdir, config=None, corpus=None, progress=False):
    mesh = make_mesh(devices=jax.devices()[:1])
    return run_sft(tiny_model(), corpus or data(), config or settings(), workdir, mesh, progress=progress)


def parameters(model):
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def assert_same(left, right):
    left, right = parameters(left), parameters(right)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def numbers(workdir):
    timed = ("time", "step_seconds", "tokens_per_second", "compile_seconds", "tflops", "mfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(workdir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    return run(workdir), workdir


def test_two_stages_learn_and_report(straight):
    _, workdir = straight
    counts = [stage_steps(*pair) for pair in zip(data(), settings().stages, strict=True)]
    lines = read_metrics(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, sum(counts) + 1))
    assert [line["stage"] for line in lines] == ["sft1"] * counts[0] + ["sft2"] * counts[1]
    assert all(set(line) - {"step", "time", "stage"} <= set(METRICS) for line in lines)
    first, last = lines[0], lines[-1]
    assert abs(first["loss"] - np.log(48)) < 0.2 and last["loss"] < 0.75 * first["loss"]
    assert "compile_seconds" in first and "tokens_per_second" not in first
    assert last["tokens_per_second"] == pytest.approx(last["tokens"] / last["step_seconds"])
    assert all(line["expert_used_min"] >= 2 and 1 <= line["expert_load_max"] <= 2 for line in lines)
    assert last["tflops"] > 0 and "mfu" not in last  # a CPU has no peak in the table
    # Each stage has its own schedule, warm-up first.
    np.testing.assert_allclose([first["lr"], lines[counts[0]]["lr"]], [2e-2 / 3, 5e-3 / 2], rtol=1e-5)


class InterruptedAt:
    """Sends this process a signal as the n-th batch is taken."""

    def __init__(self, monkeypatch, step, number):
        taken, take = iter(range(1, 10**6)), BatchIterator.__next__

        def next_batch(iterator):
            if next(taken) == step:
                signal.raise_signal(number)
            return take(iterator)

        monkeypatch.setattr(BatchIterator, "__next__", next_batch)


@pytest.mark.parametrize(("step", "number"), [(4, signal.SIGINT), (14, signal.SIGTERM)], ids=["Ctrl-C", "preemption"])
def test_an_interrupted_run_resumes_to_the_same_bits(straight, tmp_path, monkeypatch, step, number):
    """In the first stage and in the second."""
    total = sum(stage_steps(*pair) for pair in zip(data(), settings().stages, strict=True))
    first_stage = stage_steps(data()[0], settings().stages[0])
    assert first_stage < 14 < total
    with monkeypatch.context() as patch:
        InterruptedAt(patch, step, number)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert max(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == step  # the step ended and was saved
    assert [line["step"] for line in numbers(tmp_path)] == list(range(1, step + 1))
    assert_same(run(tmp_path), straight[0])
    assert numbers(tmp_path) == numbers(straight[1])


def test_a_killed_run_resumes_from_its_last_checkpoint(straight, tmp_path):
    program = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        import test_train_sft
        test_train_sft.run({str(tmp_path)!r}, progress=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.PIPE, text=True)
    path = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= 5):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    bar = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, bar
    assert "SFT stage 1/2, 16 tokens" in bar and "tokens/s" in bar
    with path.open("a") as file:
        file.write('{"step": 99, "lo')
    assert_same(run(tmp_path), straight[0])
    assert numbers(tmp_path) == numbers(straight[1])


def test_a_finished_run_is_returned_as_it_is(straight):
    model, workdir = straight
    before = (workdir / "metrics.jsonl").read_text()
    assert_same(run(workdir), model)
    assert (workdir / "metrics.jsonl").read_text() == before


def test_other_data_do_not_continue_a_run(straight):
    with pytest.raises(CheckpointError, match="belongs to a run on other data, seed or batch_rows"):
        run(straight[1], corpus=[tiny_corpus(16, seed=1), tiny_corpus(32)])


def test_data_packed_for_another_stage_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the data of SFT stage 1 are packed in rows of 32 tokens"):
        run(tmp_path, corpus=data()[::-1])


def test_a_run_that_diverges_stops_and_says_so(tmp_path):
    config = settings()
    config.stages[0].lr = 1e30
    with pytest.raises(FloatingPointError, match=r"(loss|grad_norm) is (nan|inf) at step \d+ of stage sft1: lower lr"):
        run(tmp_path, config)
    assert all(np.isfinite(line["loss"]) for line in numbers(tmp_path))


def test_a_run_goes_on_past_a_collapse_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(expert_load, "COLLAPSED", 2)
    monkeypatch.setattr(expert_load, "STEPS", 2)
    run(tmp_path, sft_config(stages=settings().stages[:1]), data()[:1])
    said = [line for line in capsys.readouterr().out.splitlines() if "expert load" in line]
    assert len(said) == 1 and "collapsed for 2 steps: at step 2 the tokens use" in said[0]
    assert len(numbers(tmp_path)) == stage_steps(data()[0], settings().stages[0]) > 3


def test_an_unknown_setting_is_refused():
    with pytest.raises(KeyError, match="learning_rate"):
        stage_config(learning_rate=1.0)
    with pytest.raises(KeyError, match="stage"):
        sft_config(stage=())


def test_the_choices_of_precision_reach_the_run(tmp_path, quickly_compiled):
    choices = {"optimizer": "muon", "moments": "int8", "param_dtype": "bfloat16", "rounding": "stochastic"}
    stages = (stage_config(row_length=16, batch_rows=8, epochs=0.5, decay="constant"),)
    model = run(tmp_path, sft_config(stages=stages, **choices), [tiny_corpus(16)])
    assert {str(x.dtype) for x in parameters(model).values()} == {"bfloat16"}
    (newest,) = (tmp_path / "checkpoints").iterdir()
    arrays = json.loads((newest / "extra" / "metadata").read_text())["arrays"]
    assert arrays["opt_state.key"] == [[], "key<fry>"]
    assert any(".muon." in name and dtype == "int8" for name, (_, dtype) in arrays.items())


def test_the_position_in_the_checkpoint_is_the_iterators(straight):
    newest = max((straight[1] / "checkpoints").iterdir(), key=lambda path: int(path.name))
    extra = json.loads((newest / "extra" / "metadata").read_text())["extra"]
    assert extra["stage"] == 1 and extra["iterator"] == {"next_index": extra["done"]}
