"""The programs that tools compile: each operation, forward and backward, at its named shapes in bfloat16."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import aot, attention
from pallas_kernels.attention import gpu, tpu
from pallas_kernels.attention import work as attention_work
from pallas_kernels.attention.shapes import NORTH as ATTENTION
from pallas_kernels.attention.tpu_common import Tiles
from pallas_kernels.grouped_matmul import gpu as grouped_gpu
from pallas_kernels.grouped_matmul import rule as grouped_rule
from pallas_kernels.grouped_matmul import tiles as grouped_tiles
from pallas_kernels.grouped_matmul import tpu as grouped_tpu
from pallas_kernels.grouped_matmul import work as grouped_work
from pallas_kernels.grouped_matmul.shapes import NORTH as GROUPED
from pallas_kernels.loss_head import tpu as loss_head_tpu
from pallas_kernels.loss_head import work as loss_head_work
from pallas_kernels.loss_head.shapes import NORTH as LOSS_HEAD
from pallas_kernels.paged_attention import tpu as paged_tpu
from pallas_kernels.paged_attention import work as paged_work
from pallas_kernels.paged_attention.shapes import NORTH as PAGED
from pallas_kernels.rotary import rule as rotary_rule
from pallas_kernels.rotary import tpu as rotary_tpu
from pallas_kernels.rotary import work as rotary_work
from pallas_kernels.rotary.shapes import NORTH as ROTARY

SHAPES = {
    "attention": ATTENTION,
    "grouped_matmul": GROUPED,
    "loss_head": LOSS_HEAD,
    "paged_attention": PAGED,
    "rotary": ROTARY,
}
# kernels(shape, platform, tiles): the work of each of our kernels, by the name it is compiled under.
WORK = {
    "attention": attention_work.kernels,
    "grouped_matmul": grouped_work.kernels,
    "loss_head": loss_head_work.kernels,
    "paged_attention": paged_work.kernels,
    "rotary": rotary_work.kernels,
}
Program = tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]


def _described(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention_program(shape, platform: str, tiles=None) -> Program:
    """(function, its arguments): forward and backward of packed rows, our kernels; `tiles` of the TPU's.

    Arguments have their heads side by side, as projections leave them: four-dimensional ones lie otherwise on a TPU.
    """
    queries, keys = (1, shape.S, shape.H, shape.K), (1, shape.S, shape.G, shape.K)
    q, kv = (_described(1, shape.S, heads * shape.K) for heads in (shape.H, shape.G))
    backend = {"tpu": tpu, "cuda": gpu}[platform].attention
    kernels = functools.partial(backend, scale=shape.K**-0.5, **({} if tiles is None else {"tiles": tiles}))

    def program(q, k, v, dout, segment_ids):
        q, k, v, dout = q.reshape(queries), k.reshape(keys), v.reshape(keys), dout.reshape(queries)
        spans = attention.spans(shape.S, window=shape.window, segment_ids_BS=segment_ids)
        spans = [jnp.broadcast_to(x, segment_ids.shape) for x in spans]
        out, pull = jax.vjp(lambda *x: kernels(*x, *spans)[0], q, k, v)
        return out, pull(dout)

    return program, (q, kv, kv, q, _described(1, shape.S, dtype=jnp.int32))


def splash(shape) -> Callable:
    """(q_GRSK, k_GSK, v_GSK, segment_ids_S) -> out_GRSK by jax's splash attention, in blocks of 1024; it scales not."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S = shape.S
    # Its windows count the tokens before the query.
    one = masks.CausalMask((S, S)) if shape.window is None else masks.LocalMask((S, S), (shape.window - 1, 0), 0)
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 1024)
    sizes = kernels.BlockSizes(**blocks, block_kv_compute=512, block_kv_dkv_compute=512)

    def attention(q_GRSK, k_GSK, v_GSK, segment_ids_S):
        mask = masks.MultiHeadMask([one] * (shape.H // shape.G))
        kernel = kernels.make_splash_mqa_single_device(mask, block_sizes=sizes)
        ids = kernels.SegmentIds(segment_ids_S, segment_ids_S)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(q_GRSK, k_GSK, v_GSK)

    return attention


def shipped_attention_program(shape, platform: str, tiles=None) -> Program | None:
    """The same by `splash`, in its layout; None where it has none for the platform."""
    if platform != "tpu":
        return None
    shipped = splash(shape)
    q = _described(shape.G, shape.H // shape.G, shape.S, shape.K)
    kv = _described(shape.G, shape.S, shape.K)

    def program(q, k, v, dout, segment_ids):
        out, pull = jax.vjp(lambda *x: shipped(*x, segment_ids), q, k, v)
        return out, pull(dout)

    return program, (q, kv, kv, q, _described(shape.S, dtype=jnp.int32))


def grouped_matmul_program(shape, platform: str, tiles=None) -> Program:
    """Forward and backward of one grouped product; `tiles` of the TPU's."""
    return _grouped(shape, platform, grouped_rule.grouped_matmul, tiles, 1)


def gated_grouped_matmul_program(shape, platform: str, tiles=None) -> Program:
    """The same of the gated pair."""
    return _grouped(shape, platform, grouped_rule.gated_grouped_matmul, tiles, 2)


def _grouped(shape, platform: str, differentiable: Callable, tiles, matrices: int) -> Program:
    backend = {"tpu": grouped_tpu, "cuda": grouped_gpu}[platform]
    kernels = differentiable(backend, **({} if tiles is None else {"tiles": tiles}))

    def program(sizes, dout, *arrays):
        out, pull = jax.vjp(lambda *arrays: kernels(*arrays, sizes), *arrays)
        return out, pull(dout)

    x, out, w = _described(shape.P, shape.D), _described(shape.P, shape.F), _described(shape.E, shape.D, shape.F)
    return program, (_described(shape.E, dtype=jnp.int32), out, x, *[w] * matrices)


def loss_head_program(shape, platform: str, tiles=None) -> Program | None:
    """Log-probabilities, their log-sum-exp and entropies, and both gradients. None where it has no kernels."""
    if platform != "tpu":
        return None

    def program(x, w, target, dlogp):
        values, pull = jax.vjp(lambda x, w: loss_head_tpu.token_logprobs(x, w, target, 1.0, True, tiles), x, w)
        return values, pull((dlogp, dlogp, dlogp))

    numbers = _described(1, shape.N, dtype=jnp.int32), _described(1, shape.N, dtype=jnp.float32)
    return program, (_described(1, shape.N, shape.D), _described(shape.V, shape.D), *numbers)


def paged_attention_program(shape, platform: str, tiles=None) -> Program | None:
    """One call over full tables of a pool that holds them all; forward only. None where it has no kernel."""
    if platform != "tpu":
        return None
    pool = _described(shape.G, shape.B * shape.W, shape.P, shape.K)
    table = _described(shape.B, shape.W, dtype=jnp.int32)
    spans = [_described(shape.B, shape.S, dtype=jnp.int32)] * 2
    return paged_tpu.paged_attention, (_described(shape.B, shape.S, shape.H, shape.K), pool, pool, table, *spans)


def rotary_program(shape, platform: str, tiles=None) -> Program | None:
    """The turn of one array and the turn back of its gradient, heads side by side. None where it has no kernel."""
    if platform != "tpu":
        return None

    def program(x, dout, cos, sin):
        x, dout = (a.reshape(1, shape.S, shape.H, shape.K) for a in (x, dout))
        out, pull = jax.vjp(lambda x: rotary_rule.rotate(rotary_tpu.rotate, x, cos, sin), x)
        return out.reshape(1, shape.S, -1), pull(dout)[0].reshape(1, shape.S, -1)

    x, angle = _described(1, shape.S, shape.H * shape.K), _described(1, shape.S, shape.K)
    return program, (x, x, angle, angle)


# By operation, then by name; the names of our own begin with "ours", and tiles are ranked by the first.
PROGRAMS = {
    "attention": {"ours": attention_program, "as jax ships it": shipped_attention_program},
    "grouped_matmul": {"ours": grouped_matmul_program, "ours, gated": gated_grouped_matmul_program},
    "loss_head": {"ours": loss_head_program},
    "paged_attention": {"ours": paged_attention_program},
    "rotary": {"ours": rotary_program},
}
# The operations that have tiles to rank.
TILES = {"attention": Tiles, "grouped_matmul": grouped_tiles.Tiles}


def tiles(op: str, chip: str):
    """The tiles that an operation has on a chip. None: its kernel's own."""
    if aot.CHIPS[chip].platform != "tpu" or op not in TILES:
        return None
    if op == "attention":
        return Tiles()
    return grouped_tiles.tuned(chip)


def candidates(op: str, chip: str) -> list:
    """Tiles worth ranking on a TPU: few, since each is compiled."""
    if op == "attention":
        return [Tiles(), Tiles(q=512), Tiles(k=512), Tiles(compute=256), Tiles(compute=1024)]
    shared = sorted({1, aot.CHIPS[chip].cores})
    return [grouped_tiles.Tiles(512, 2048, 128, depth, blocks) for blocks in shared for depth in (128, 256)]
