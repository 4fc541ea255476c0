import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from train_tiny import tiny_corpus, tiny_model

from north_jax.data import BatchIterator
from north_jax.model import Decoder, ModelConfig
from north_jax.parallel import make_mesh
from north_jax.rl.learner import rl_config, run_rl
from north_jax.train import optimizer as module
from north_jax.train.loss import sft_loss
from north_jax.train.optimizer import (
    CHOICES,
    Quantised,
    dequantise,
    is_decayed,
    make_optimizer,
    make_schedule,
    quantise,
    random_bits,
    stochastic_round,
)
from north_jax.train.sft import run_sft, sft_config, stage_config

PARAMETERS = (("float32", "nearest"), ("bfloat16", "nearest"), ("bfloat16", "stochastic"))


pytestmark = pytest.mark.usefixtures("quickly_compiled")


def constant(lr):
    return make_schedule(lr, 0, decay="constant")


def states_with(name, opt_state):
    return [s for s in jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, name)) if hasattr(s, name)]


def test_schedules_by_hand():
    linear = [float(make_schedule(1.0, 10, warmup=4)(step)) for step in range(11)]
    np.testing.assert_allclose(linear, [0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0], atol=1e-6)
    cosine = make_schedule(2.0, 10, decay="cosine")
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10)], [2.0, 1.0, 0.0], atol=1e-6)
    constant = make_schedule(3.0, 0, warmup=2, decay="constant")
    np.testing.assert_allclose([constant(s) for s in (0, 1, 2, 1000)], [1, 2, 3, 3], atol=1e-6)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="unknown learning-rate decay 'exponential': use linear"):
        make_schedule(1.0, 10, decay="exponential")
    with pytest.raises(ValueError, match="a warm-up of 10 steps does not end within 10 steps"):
        make_schedule(1.0, 10, warmup=10)


def test_decay_spares_the_norms_and_clipping_bounds_the_gradient():
    params = nnx.state(tiny_model(), nnx.Param)
    params = jax.tree.map(lambda x: jnp.ones_like(x), params)
    optimizer = make_optimizer(constant(0.1), weight_decay=0.5).transform
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        expected = 0.0 if "norm" in jax.tree_util.keystr(path) else -0.1 * 0.5
        np.testing.assert_allclose(update, expected, atol=1e-7)

    # The first moment after one step is (1 - b1) times the clipped gradient, whose norm is 1.
    steep = jax.tree.map(lambda x: jnp.full_like(x, 100.0), params)
    _, state = optimizer.update(steep, optimizer.init(params), params)
    (adam,) = states_with("mu", state)
    norm = np.sqrt(sum(float((m**2).sum()) for m in jax.tree.leaves(adam.mu)))
    np.testing.assert_allclose(norm, 0.1, rtol=1e-5)


def test_unknown_choices_are_refused():
    for name, known in CHOICES.items():
        with pytest.raises(ValueError, match=f"unknown {name} 'other': use {' or '.join(known)}$"):
            make_optimizer(constant(1.0), **{name: "other"})
    with pytest.raises(ValueError, match="rounding 'stochastic' needs param_dtype 'bfloat16', not 'float32'"):
        make_optimizer(constant(1.0), rounding="stochastic")


@pytest.mark.parametrize("name", CHOICES)
def test_both_loops_hand_the_choices_on(name, tmp_path):
    with pytest.raises(ValueError, match=f"unknown {name} 'other'"):
        config = sft_config(stages=(stage_config(row_length=16, decay="constant"),), **{name: "other"})
        run_sft(None, [tiny_corpus(16)], config, tmp_path, None)
    rest = dict.fromkeys(
        ("templates", "make_task", "task_from_id", "harnesses", "chat", "sampler", "pool", "sampling", "witness")
    )
    with pytest.raises(ValueError, match=f"unknown {name} 'other'"):
        run_rl(None, rl_config(**{name: "other"}), tmp_path, None, **rest)


def random_like(params, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), params)


def test_without_choices_it_is_optax_bit_for_bit():
    schedule, params = make_schedule(1e-2, 10, warmup=2), nnx.state(tiny_model(), nnx.Param)
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.95,
            weight_decay=0.01,
            mask=lambda params: jax.tree_util.tree_map_with_path(is_decayed, params),
        ),
    )
    ours = make_optimizer(schedule).transform
    state, expected_state = ours.init(params), plain.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    for seed in range(2):
        updates, state = jax.jit(ours.update)(random_like(params, seed), state, params)
        expected, expected_state = jax.jit(plain.update)(random_like(params, seed), expected_state, params)
        for got, want in zip(
            jax.tree.leaves((updates, state)), jax.tree.leaves((expected, expected_state)), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_random_bits_are_fair_and_follow_from_key_name_and_place():
    shape, key = (16, 64, 128), jax.random.key(0)
    split = NamedSharding(make_mesh(fsdp=2, expert=2, tensor=2), PartitionSpec("expert", "fsdp", "tensor"))

    def draw(seed, name, **kwargs):
        return np.asarray(jax.jit(random_bits, static_argnums=(1, 2), **kwargs)(jax.random.key(seed), name, shape))

    bits = draw(0, "a")
    np.testing.assert_array_equal(bits, draw(0, "a", out_shardings=split))
    np.testing.assert_array_equal(bits[:4], random_bits(key, "a", (4, *shape[1:])))
    sigma = bits.size**-0.5
    for bit in range(32):
        assert abs((bits >> bit & 1).mean() - 0.5) < 5 * sigma / 2
    uniform = bits / 2**32 - 0.5
    others = [draw(1, "a"), draw(0, "b"), np.roll(bits, 1), np.roll(bits, 128), np.roll(bits, 64 * 128)]
    for other in others:
        assert abs((uniform * (other / 2**32 - 0.5)).mean() * 12) < 5 * sigma


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_exact():
    every = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    for bits in (0, 0xFFFFFFFF):
        rounded = np.asarray(stochastic_round(jnp.asarray(every, jnp.float32), jnp.full(every.shape, bits, jnp.uint32)))
        normal = np.isfinite(every.astype(np.float32))
        np.testing.assert_array_equal(rounded[normal].view(np.uint16), every[normal].view(np.uint16))
        np.testing.assert_array_equal(rounded[~normal].astype(np.float32), every[~normal].astype(np.float32))
        # Not numbers that bfloat16 does not hold, whose bits an addition would carry over to inf or 0.
        strange = jax.lax.bitcast_convert_type(
            jnp.asarray([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], jnp.uint32), jnp.float32
        )
        assert jnp.isnan(stochastic_round(strange, jnp.full(3, bits, jnp.uint32))).all()
    x_N = jnp.asarray([1 + 2**-12, -0.3, 1 / 3, 1e-30, 3e38, 1.003], jnp.float32)
    count = 40_000
    rounded = jax.jit(lambda x_CN: stochastic_round(x_CN, random_bits(jax.random.key(0), "x", x_CN.shape)))(
        jnp.broadcast_to(x_N, (count, len(x_N)))
    )
    rounded = np.asarray(rounded, np.float64)
    for column, x in zip(rounded.T, np.asarray(x_N, np.float64), strict=True):
        values = np.unique(column)
        assert len(values) == 2 and values[0] < x < values[1]
        assert abs(column.mean() - x) < 5 * np.ptp(values) / 2 / count**0.5


@pytest.mark.parametrize("rounding", CHOICES["rounding"])
def test_updates_below_the_last_place_move_only_what_is_rounded_stochastically(rounding):
    # Adam under a constant gradient moves by the learning rate: 1e-4, where bfloat16 numbers below 1 are 39e-4 apart.
    transform = make_optimizer(
        constant(1e-4), param_dtype="bfloat16", rounding=rounding, weight_decay=0.0, clip=1e9
    ).transform

    def one(carry, _):
        params, state = carry
        updates, state = transform.update(jax.tree.map(jnp.ones_like, params), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = {"w_DF": jnp.ones((64, 128), jnp.bfloat16)}
    run = jax.jit(lambda params: jax.lax.scan(one, (params, transform.init(params)), length=100)[0][0])
    moved = 1 - np.asarray(run(params)["w_DF"], np.float64)
    if rounding == "nearest":
        assert (moved == 0).all()
    else:  # a hundred draws an element of deviation sqrt(1e-4 * 39e-4): the mean's is 7e-5
        np.testing.assert_allclose(moved.mean(), 1e-2, atol=4e-4)
        np.testing.assert_allclose(moved.std(), (100 * 1e-4 * 39e-4) ** 0.5, rtol=0.1)  # other draws in every step


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("width", [256, 200])
def test_a_quantised_moment_is_right_on_average_over_decades(signed, width):
    random = np.random.default_rng(0)
    x = np.exp(random.uniform(np.log(1e-4), 0, (8, width))) * np.exp(random.normal(size=(8, 1)) * 5)
    x = np.where(random.random(x.shape) < 0.5, -x, x) if signed else x**2
    x[3] = 0
    x[4, 0] = 0

    @jax.jit
    def many(x):
        def draw(key):
            stored = quantise(x, random_bits(key, "x", x.shape), signed=signed)
            return stored, dequantise(stored)

        return jax.vmap(draw)(jax.random.split(jax.random.key(0), 400))

    stored, values = many(jnp.asarray(x, jnp.float32))
    assert stored.values.dtype == (jnp.int8 if signed else jnp.uint8)
    assert stored.scales.shape == (400, 8, 2 if width == 256 else 1)
    values = np.asarray(values, np.float64)
    assert (values[:, 3] == 0).all()
    if signed:
        assert (values[:, 4, 0] == 0).all() and (values * x >= 0).all()
    else:
        assert (values[:, np.arange(8) != 3] > 0).all()
    # The scale of every value, and the distance of the two levels around it.
    blocks = np.abs(x).reshape(8, -1, 128 if width == 256 else width)
    scale = np.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(x.shape)
    top, power = (127, 2) if signed else (255, 4)
    level = (np.abs(x) / np.where(scale > 0, scale, 1)) ** (1 / power) * top
    gap = scale * ((np.floor(level + 1e-4) + 1) ** power - np.floor(level - 1e-4).clip(0) ** power) / top**power
    live = (scale > 0) & ((level > 1) | signed)
    assert (np.abs(values - x)[:, live] <= gap[live] * 1.001).all()
    assert (np.abs(values.mean(0) - x)[live] <= 5 * gap[live] / 2 / 400**0.5 + 1e-6 * np.abs(x)[live]).all()


@pytest.mark.parametrize("moments", CHOICES["moments"][1:])
def test_stored_moments_follow_the_exact_ones(moments):
    # Columns whose gradients span two decades; after 100 steps every second column gets none, and its moments decay.
    size_F = np.repeat(np.geomspace(1, 0.01, 4), 64).astype(np.float32)
    grads_TDF = np.random.default_rng(0).normal(size=(150, 64, 256)).astype(np.float32) * size_F
    grads_TDF[100:, :, ::2] = 0

    def final(moments):
        transform = make_optimizer(constant(1e-3), moments=moments, clip=1e9).transform
        params = {"w_DF": jnp.zeros((64, 256))}

        def one(state, grads):
            return transform.update({"w_DF": grads}, state, params)[1], None

        state = jax.jit(lambda grads: jax.lax.scan(one, transform.init(params), grads)[0])(grads_TDF)
        (adam,) = states_with("nu", state)
        values = (adam.mu["w_DF"], adam.nu["w_DF"])
        if moments != "int8":
            assert {value.dtype for value in values} == {jnp.dtype(moments)}
        return [np.asarray(dequantise(v) if isinstance(v, Quantised) else v, np.float64) for v in values]

    for got, want, power in zip(final(moments), final("float32"), (1, 2), strict=True):
        for column in range(0, 256, 64):
            for silent in (0, 1):
                part = np.s_[:, column + silent : column + 64 : 2]
                size = np.abs(want[part]).mean()
                # On average right to a few percent of what the moment was while there were gradients.
                assert abs((got[part] - want[part]).mean()) < 0.03 * size_F[column] ** power
                if silent or power == 2:
                    assert abs(np.abs(got[part]).mean() - size) < 0.1 * size


def test_muon_makes_the_matrices_orthogonal_and_leaves_the_rest_to_adam():
    params = nnx.state(tiny_model(), nnx.Param)
    transform = make_optimizer(constant(1.0), optimizer="muon", weight_decay=0.0).transform
    updates, _ = jax.jit(transform.update)(random_like(params, 0), transform.init(params), params)
    layers = nnx.to_pure_dict(updates)["layers"]
    rows = {"q_DHK": 16, "k_DGK": 16, "v_DGK": 16, "o_HKD": 32}  # input size: heads count together
    matrices = [layers[i]["attention"][name].reshape(size, -1) for i in (0, 1) for name, size in rows.items()]
    matrices += layers[0]["mlp"].values()
    matrices += [expert for name in ("gate_EDF", "up_EDF", "down_EFD") for expert in layers[1]["mlp"][name]]
    assert len(matrices) == 8 + 3 + 3 * 4
    for matrix in matrices:
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
        assert singular.min() > 0.5 and singular.max() < 1.3  # what five Newton-Schulz steps reach, not exactly 1
    # Adam's first step with Nesterov momentum is g (b1 (1 - b1) / (1 - b1²) + 1) / |g|.
    tree = nnx.to_pure_dict(updates)
    for update in (tree["embedding_VD"], tree["norm"]["scale_D"], layers[1]["mlp"]["router_DE"]):
        np.testing.assert_allclose(np.abs(update), 0.9 * 0.1 / 0.19 + 1, rtol=1e-3)


def test_muon_decays_what_adamw_decays_and_refuses_a_matrix_it_does_not_know():
    params = jax.tree.map(jnp.ones_like, nnx.state(tiny_model(), nnx.Param))
    transform = make_optimizer(constant(0.1), optimizer="muon", weight_decay=0.5).transform
    updates, _ = jax.jit(transform.update)(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        expected = 0.0 if "norm" in jax.tree_util.keystr(path) else -0.1 * 0.5
        np.testing.assert_allclose(update, expected, atol=1e-7)
    with pytest.raises(ValueError, match=r"Muon does not know the axes of parameter .*bias_FF.*: add it to _MATRICES"):
        transform.init({"bias_FF": jnp.ones((4, 4))})


def test_the_table_of_bytes_is_right():
    lines = [line.split() for line in module.__doc__.splitlines()]
    table = {tuple(line[:3]): [float(x) for x in line[3:]] for line in lines if line and line[0] in ("adamw", "muon")}
    assert set(table) == set(itertools.product(*(CHOICES[name] for name in ("optimizer", "moments", "param_dtype"))))
    for (optimizer, moments, param_dtype), expected in table.items():
        params = {"gate_DF": jax.ShapeDtypeStruct((256, 512), param_dtype)}
        transform = make_optimizer(
            constant(1.0), optimizer=optimizer, moments=moments, param_dtype=param_dtype
        ).transform
        state = jax.eval_shape(transform.init, params)
        bytes_ = [
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim == 2) / (256 * 512)
            for tree in (params, state)
        ]
        assert [*bytes_, sum(bytes_)] == expected


STEPS = 40


@pytest.fixture(scope="module")
def lessons():
    """Small batches, a one-layer model of 4 experts, and its jitted gradient."""
    config = ModelConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=8,
        prefix_dense_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        first_k_dense_replace=0,
        layer_types=("full_attention",),
        dtype="float32",
    )
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    iterator = BatchIterator(tiny_corpus(32, count=400), 8, seed=0)
    batches = [next(iterator) for _ in range(STEPS)]
    gradient = jax.jit(jax.value_and_grad(lambda params, batch: sft_loss(nnx.merge(graphdef, params), batch, batch)[0]))
    return params, batches, gradient


@pytest.fixture(scope="module")
def learn(lessons):
    params, batches, gradient = lessons
    done = {}

    def run(optimizer, moments, param_dtype, rounding):
        choices = (optimizer, moments, param_dtype, rounding)
        if choices not in done:
            transform = make_optimizer(
                make_schedule(1e-2, STEPS, warmup=3),
                optimizer=optimizer,
                moments=moments,
                param_dtype=param_dtype,
                rounding=rounding,
            ).transform

            @jax.jit
            def update(grads, state, params):
                updates, state = transform.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            own, losses = optax.tree.cast(params, jnp.dtype(param_dtype)), []
            state = jax.jit(transform.init)(own)
            for batch in batches:
                loss, grads = gradient(own, batch)
                own, state = update(grads, state, own)
                losses.append(float(loss))
            assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype(param_dtype)}
            done[choices] = losses[0], np.mean(losses[-5:])
        return done[choices]

    return run


@pytest.mark.parametrize("parameters", PARAMETERS, ids="-".join)
@pytest.mark.parametrize("moments", CHOICES["moments"])
@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
def test_every_choice_learns_as_float32_does(learn, optimizer, moments, parameters):
    first, last = learn(optimizer, moments, *parameters)
    _, exact = learn(optimizer, "float32", "float32", "nearest")
    assert abs(first - np.log(48)) < 0.1 and exact < 2.5
    assert abs(last - exact) < 0.04  # the farthest measured: 0.013
