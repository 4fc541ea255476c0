import jax
import numpy as np
import pytest
from train_tiny import tiny_corpus, tiny_model

from north_jax.parallel import make_mesh, parameter_shardings
from north_jax.train.loss import sft_loss
from north_jax.train.optimizer import adamw, make_schedule
from north_jax.train.step import init_state, make_train_step, restart, shard_batch

OPTIMIZER = adamw(make_schedule(1e-2, 100, warmup=3))


def batches(count=3, rows=8):
    packed = tiny_corpus(32, count=200)
    fields = ("ids_BS", "segment_ids_BS", "positions_BS", "weights_BS")
    return [{f: getattr(packed, f)[-(i + 1) * rows :][:rows] for f in fields} for i in range(count)]


def train(mesh):
    state = init_state(tiny_model(), OPTIMIZER, mesh)
    step = make_train_step(sft_loss, OPTIMIZER, mesh)
    history = []
    for batch in batches():
        batch = shard_batch(batch, mesh)
        # Nothing inside the step may touch the host.
        with jax.transfer_guard("disallow"), jax.log_compiles():
            state, metrics = step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


@pytest.fixture(scope="module")
def single():
    return train(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_sharded_step_is_the_single_device_step(single, sizes, caplog):
    mesh = make_mesh(**sizes)
    state, history = train(mesh)
    # The layout that comes out is the one that goes in: compiled once.
    assert sum(record.getMessage().startswith("Compiling jit(step)") for record in caplog.records) == 1
    expected_state, expected_history = single
    for got, want in zip(history, expected_history, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, err_msg=name)
    # Adam divides by the gradient's size: where that is near 0 the order of a sum shows. lr 1e-2, three steps.
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    for got, want in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(parameter_shardings(mesh, state.params)), strict=True
    ):
        assert got.sharding.is_equivalent_to(want, got.ndim)
    moments = [s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu")]
    for got, want in zip(jax.tree.leaves(moments), jax.tree.leaves(state.params), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_the_step_reports_and_learns(single):
    state, history = single
    assert int(state.step) == 3
    assert set(history[0]) == {"loss", "grad_norm", "lr", "tokens", "loss_tokens", "fill"}
    np.testing.assert_allclose([h["lr"] for h in history], [2.5e-3, 5e-3, 7.5e-3], rtol=1e-5)
    assert abs(history[0]["loss"] - np.log(48)) < 0.1 and history[2]["loss"] < history[0]["loss"]


def test_the_old_state_is_donated_and_restart_keeps_the_parameters():
    mesh = make_mesh(data=8)
    state = init_state(tiny_model(), OPTIMIZER, mesh)
    new, _ = make_train_step(sft_loss, OPTIMIZER, mesh)(state, shard_batch(batches(1)[0], mesh))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    again = restart(new, OPTIMIZER, mesh)
    assert int(again.step) == 0 and jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.params, new.params))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(again.opt_state))


def test_a_batch_that_does_not_divide_is_refused():
    mesh = make_mesh(data=8)
    with pytest.raises(ValueError, match="make batch_rows a multiple of data \\* fsdp \\* expert"):
        shard_batch({"ids_BS": np.zeros((6, 4), np.int32)}, mesh)
