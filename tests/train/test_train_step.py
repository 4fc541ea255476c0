import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from train_tiny import FOUR, FourParameters, tiny_corpus, tiny_model

from north_jax.parallel import make_mesh, parameter_shardings
from north_jax.train.loss import SFT, Objective
from north_jax.train.optimizer import Quantised, make_optimizer, make_schedule
from north_jax.train.step import init_state, make_train_step, restart, shard_batch
from north_jax.weights.checkpoint import Checkpoints

SCHEDULE = make_schedule(1e-2, 100, warmup=3)
OPTIMIZER = make_optimizer(SCHEDULE)
EIGHT = {"fsdp": 2, "expert": 2, "tensor": 2}


def batches(count=3, rows=8):
    packed = tiny_corpus(32, count=200)
    fields = ("ids_BS", "segment_ids_BS", "positions_BS", "weights_BS")
    return [{f: getattr(packed, f)[-(i + 1) * rows :][:rows] for f in fields} for i in range(count)]


def train(mesh):
    state = init_state(tiny_model(), OPTIMIZER, mesh)
    step = make_train_step(SFT, OPTIMIZER, mesh)
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


@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}, {"data": 2, "context": 4}],
    ids=str,
)
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
    load = {f"expert_{name}" for name in ("load_max", "load_entropy", "dead_share", "used_min", "used_layer")}
    assert set(history[0]) == {"loss", "grad_norm", "lr", "tokens", "loss_tokens", "fill"} | load
    np.testing.assert_allclose([h["lr"] for h in history], [2.5e-3, 5e-3, 7.5e-3], rtol=1e-5)
    assert abs(history[0]["loss"] - np.log(48)) < 0.1 and history[2]["loss"] < history[0]["loss"]


def test_the_old_state_is_donated_and_restart_keeps_the_parameters():
    mesh = make_mesh(data=8)
    state = init_state(tiny_model(), OPTIMIZER, mesh)
    new, _ = make_train_step(SFT, OPTIMIZER, mesh)(state, shard_batch(batches(1)[0], mesh))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    again = restart(new, OPTIMIZER, mesh)
    assert int(again.step) == 0 and jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.params, new.params))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(again.opt_state))


def test_a_batch_that_does_not_divide_is_refused():
    mesh = make_mesh(data=8)
    with pytest.raises(ValueError, match="make batch_rows a multiple of data \\* fsdp \\* expert"):
        shard_batch({"ids_BS": np.zeros((6, 4), np.int32)}, mesh)


def phases(mesh):
    random = np.random.default_rng(0)
    return [shard_batch({"phase_BS": random.normal(size=(8, 4)).astype(np.float32)}, mesh) for _ in range(4)]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_sharded_step_quantises_as_the_single_device_step_does(kind, quickly_compiled):
    optimizer = make_optimizer(SCHEDULE, optimizer=kind, moments="int8")

    def train(mesh):
        state, step = init_state(FourParameters(), optimizer, mesh), make_train_step(FOUR, optimizer, mesh)
        for batch in phases(mesh):
            state, _ = step(state, batch)
        return state

    def named(tree):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Quantised))
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    def moments(state):
        return {name: leaf for name, leaf in named(state.opt_state).items() if isinstance(leaf, Quantised)}

    state, expected = train(make_mesh(**EIGHT)), train(make_mesh(devices=jax.devices()[:1]))
    params, got, want = named(state.params), moments(state), moments(expected)
    for name, param in named(expected.params).items():
        np.testing.assert_allclose(params[name], param, atol=1e-5)
    assert len(got) == {"adamw": 4 + 4, "muon": 2 + 2 + 2}[kind]
    for name, moment in got.items():
        (param,) = [x for path, x in params.items() if name.endswith(path)]
        assert moment.values.shape == param.shape and moment.values.sharding.is_equivalent_to(
            param.sharding, param.ndim
        )
        assert moment.scales.shape == (*param.shape[:-1], param.shape[-1] // 128 or 1)
        difference = np.abs(moment.values - np.asarray(want[name].values).astype(np.int32))
        assert difference.max() <= 1 and difference.mean() < 0.01  # a draw may fall between two orders of a sum
        np.testing.assert_allclose(moment.scales, want[name].scales, rtol=1e-3)


class OneMatrix(nnx.Module):
    def __init__(self, width):
        self.w_DF = nnx.Param(jnp.zeros((4, width)), axes=("head_dim", "embed"))


@pytest.mark.parametrize("width, last", [(1024, "fsdp"), (512, None), (72, None)])
def test_scales_lie_with_their_blocks_where_these_divide(width, last):
    state = init_state(OneMatrix(width), make_optimizer(SCHEDULE, moments="int8"), make_mesh(fsdp=8))
    leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, Quantised))
    moments = [x for x in leaves if isinstance(x, Quantised)]
    assert len(moments) == 2
    for values, scales in moments:
        assert values.sharding.spec == PartitionSpec(None, ("fsdp",))
        assert scales.shape == (4, width // 128 or 1)
        assert scales.sharding.spec == PartitionSpec(None, (last,) if last else None)


def test_a_restored_run_draws_what_the_straight_one_draws(tmp_path, quickly_compiled):
    optimizer = make_optimizer(
        SCHEDULE, optimizer="muon", moments="int8", param_dtype="bfloat16", rounding="stochastic", seed=3
    )
    mesh = make_mesh(**EIGHT)
    step = make_train_step(FOUR, optimizer, mesh)
    state, checkpoints = init_state(FourParameters(), optimizer, mesh), Checkpoints(tmp_path)
    for number, batch in enumerate(phases(mesh)):
        if number == 2:
            checkpoints.save(number, state, {})
        state, _ = step(state, batch)
    _, again, _ = checkpoints.restore_latest(init_state(FourParameters(seed=1), optimizer, mesh))
    checkpoints.close()
    for batch in phases(mesh)[2:]:
        again, _ = step(again, batch)

    def bits(state):
        leaves = jax.tree.leaves(state)
        keys = [x for x in leaves if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        assert len(keys) == 1
        return [np.asarray(jax.random.key_data(x) if x is keys[0] else x) for x in leaves]

    for got, want in zip(bits(again), bits(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_parameters_are_of_the_type_that_was_chosen():
    mesh = make_mesh(devices=jax.devices()[:1])
    for dtype, first, then in (("bfloat16", jnp.float32, 2), ("float32", jnp.bfloat16, 4)):
        model = OneMatrix(8)
        model.w_DF[...] = jnp.arange(32.0).reshape(4, 8)
        nnx.update(model, jax.tree.map(lambda x, first=first: x.astype(first), nnx.state(model)))
        (param,) = jax.tree.leaves(init_state(model, make_optimizer(SCHEDULE, param_dtype=dtype), mesh).params)
        assert param.dtype == dtype and param.nbytes == 32 * then
        np.testing.assert_array_equal(param.astype(jnp.float32), np.arange(32.0).reshape(4, 8))


def test_bfloat16_gradients_are_clipped_by_a_float32_norm():
    mesh = make_mesh(devices=jax.devices()[:1])
    slopes = jnp.asarray(np.random.default_rng(0).normal(size=(4, 72)), jnp.bfloat16)
    optimizer = make_optimizer(SCHEDULE, param_dtype="bfloat16", clip=0.5)
    step = make_train_step(
        Objective(lambda model, batch, whole: ((model.w_DF[...] * slopes).sum(), {})), optimizer, mesh
    )
    state, metrics = step(init_state(OneMatrix(72), optimizer, mesh), {})
    exact = np.asarray(slopes, np.float64)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(exact), rtol=1e-6)
    (mu,) = jax.tree.leaves(state.opt_state[1][0].mu)
    np.testing.assert_allclose(mu, 0.1 * 0.5 * exact / np.linalg.norm(exact), rtol=1e-5)


def test_parts_of_a_batch_add_up_to_its_step():
    batch, mesh = batches(1)[0], make_mesh(data=2, devices=jax.devices()[:2])

    def stepped(accumulate):
        step = make_train_step(SFT, OPTIMIZER, mesh, accumulate=accumulate)
        state, metrics = step(init_state(tiny_model(), OPTIMIZER, mesh), shard_batch(batch, mesh))
        return jax.tree.leaves(state.params), metrics

    (whole, expected), (parts, metrics) = stepped(1), stepped(4)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for got, want in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    with pytest.raises(ValueError, match="a batch of 8 rows does not divide into accumulate=3 parts"):
        stepped(3)


def test_float32_parameters_compute_in_bfloat16():
    mesh = make_mesh(devices=jax.devices()[:1])
    batch = shard_batch(batches(1)[0], mesh)

    def stepped(**options):
        optimizer = make_optimizer(SCHEDULE, **options)
        return make_train_step(SFT, optimizer, mesh)(init_state(tiny_model(), optimizer, mesh), batch)

    (state, metrics), (_, rounded) = stepped(compute_dtype="bfloat16"), stepped(param_dtype="bfloat16")
    assert {param.dtype for param in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    # The same pass over the same bfloat16 numbers; float32 ones give another loss.
    assert metrics["loss"] == rounded["loss"] != stepped()[1]["loss"]
