"""The loss head as Pallas TPU kernels: logits live in VMEM, a tile at a time, in every direction.

The forward kernel keeps a tile of tokens and lets the vocabulary pass by, with a running log-sum-exp. The gradients
compute their tiles of logits again: one kernel keeps tokens and sums dx over the vocabulary, one keeps rows of the
vocabulary and sums dw over the tokens. Sums are float32 and in a fixed order. 5 products of N D V in all: 1 forward,
4 backward. One kernel for both gradients would need 3, and would read and write one of the two sums from HBM once per
tile: as long as its products on v6e, by the data sheets' figures.

With s = scale x wᵀ and p = exp(s - lse), all per token: dlogits = dlogp 1[target] + (dlse - dlogp) p, dx = scale
dlogits w, dw = scale dlogitsᵀ x.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_common import (
    FLOOR,
    HIDDEN,
    LANES,
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    as_columns,
    dot,
    round_up,
    widen,
)

SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens and rows of the vocabulary of a tile, rows (for dw: tokens) multiplied at once, and bytes of VMEM."""

    n: int
    v: int
    compute: int
    vmem_bytes: int = 56 * 2**20

    def fit(self, N: int, V: int) -> "Tiles":
        """These tiles, no larger than what N tokens and V rows fill."""
        compute = min(self.compute, round_up(max(N, V), LANES))
        n, v = (min(tile, round_up(size, compute)) for tile, size in ((self.n, N), (self.v, V)))
        return dataclasses.replace(self, n=n, v=v, compute=compute)


# What lets a width of 2048, twice for what comes and goes, and a float32 sum lie in the 64 MiB of v5p and TPU7x.
TILES = {
    jnp.dtype(jnp.bfloat16): Tiles(n=1024, v=1024, compute=512),
    jnp.dtype(jnp.float32): Tiles(n=512, v=512, compute=256),
}


def _last_or_whole(V: int, tiles: Tiles, use) -> None:
    """use(ragged) for this tile of the vocabulary, which is ragged where it reaches beyond the last row."""
    if V % tiles.v == 0:
        use(False)
    else:
        last = pl.program_id(1) == pl.num_programs(1) - 1
        pl.when(last)(lambda: use(True))
        pl.when(jnp.logical_not(last))(lambda: use(False))


def _forward_kernel(
    target_ref, x_ref, w_ref, picked_ref, lse_ref, entropy_ref, m_ref, l_ref, t_ref, e_ref,
    *, tiles: Tiles, V: int, scale: float, with_entropy: bool,
):  # fmt: skip
    # The vocabulary lies along rows: what belongs to a token is a row, and sums stay apart per sublane until the end.
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, FLOOR)
        for ref in (l_ref, t_ref, e_ref):
            ref[...] = jnp.zeros_like(ref)

    def use(ragged: bool):
        for c in range(tiles.v // tiles.compute):
            s_VN = dot(w_ref[pl.ds(c * tiles.compute, tiles.compute), :], x_ref[...], ROWS_BY_ROWS) * scale
            row = j * tiles.v + c * tiles.compute + jax.lax.broadcasted_iota(jnp.int32, s_VN.shape, 0)
            t_ref[...] += jnp.sum(_eights(jnp.where(row == target_ref[...], s_VN, 0.0)), axis=0)
            s_e8N = _eights(jnp.where(row < V, s_VN, HIDDEN) if ragged else s_VN)
            before_8N = m_ref[...]
            m_8N = jnp.maximum(before_8N, jnp.max(s_e8N, axis=0))
            m_ref[...] = m_8N
            p_e8N = jnp.exp(s_e8N - m_8N)
            fade_8N = jnp.exp(before_8N - m_8N)
            if with_entropy:  # Σ p (s - m), which moves with the maximum
                e_ref[...] = fade_8N * (e_ref[...] + l_ref[...] * (before_8N - m_8N))
                e_ref[...] += jnp.sum(p_e8N * (s_e8N - m_8N), axis=0)
            l_ref[...] = fade_8N * l_ref[...] + jnp.sum(p_e8N, axis=0)

    _last_or_whole(V, tiles, use)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        m_1N = jnp.max(m_ref[...], axis=0, keepdims=True)
        share_8N = jnp.exp(m_ref[...] - m_1N)
        l_1N = jnp.sum(share_8N * l_ref[...], axis=0, keepdims=True)
        picked_ref[...] = jnp.sum(t_ref[...], axis=0, keepdims=True)
        lse_ref[...] = m_1N + jnp.log(l_1N)
        e_8N = e_ref[...] + l_ref[...] * (m_ref[...] - m_1N)
        entropy_ref[...] = jnp.log(l_1N) - jnp.sum(share_8N * e_8N, axis=0, keepdims=True) / l_1N


def _eights(x_VN: jax.Array) -> jax.Array:
    """[V, N] -> [V / 8, 8, N], which moves nothing."""
    return x_VN.reshape(-1, SUBLANES, x_VN.shape[1])


def _dx_kernel(
    target_ref, lse_ref, dpicked_ref, dlse_ref, x_ref, w_ref, dx_ref, target_NL, lse_NL, dpicked_NL, dlse_NL, acc_ref,
    *, tiles: Tiles, V: int, scale: float,
):  # fmt: skip
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        rows = (target_ref, lse_ref, dpicked_ref, dlse_ref)
        for ref, columns in zip(rows, (target_NL, lse_NL, dpicked_NL, dlse_NL), strict=True):
            columns[...] = as_columns(ref[...])

    def use(ragged: bool):
        for c in range(tiles.v // tiles.compute):
            first = j * tiles.v + c * tiles.compute
            w_VD = w_ref[pl.ds(c * tiles.compute, tiles.compute), :]
            if ragged:  # what lies beyond the last row may not be a number
                w_VD = jnp.where(first + jax.lax.broadcasted_iota(jnp.int32, w_VD.shape, 0) < V, w_VD, 0)
            s_NV = dot(x_ref[...], w_VD, ROWS_BY_ROWS) * scale
            column = first + jax.lax.broadcasted_iota(jnp.int32, s_NV.shape, 1)
            target, lse, dpicked, dlse = (
                widen(ref[...], tiles.compute) for ref in (target_NL, lse_NL, dpicked_NL, dlse_NL)
            )
            if ragged:
                s_NV = jnp.where(column < V, s_NV, HIDDEN)
            ds_NV = dlse * jnp.exp(s_NV - lse) + jnp.where(column == target, dpicked, 0.0)
            acc_ref[...] += dot(ds_NV.astype(w_VD.dtype), w_VD, ROWS_BY_COLUMNS)

    _last_or_whole(V, tiles, use)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dx_ref[...] = (acc_ref[...] * scale).astype(dx_ref.dtype)


def _dw_kernel(
    target_ref, lse_ref, dpicked_ref, dlse_ref, x_ref, w_ref, dw_ref, acc_ref, *, tiles: Tiles, scale: float
):
    # Rows of a ragged last tile beyond the vocabulary hold anything: they touch only rows of dw that are not kept.
    j = pl.program_id(0)

    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    for c in range(tiles.n // tiles.compute):
        tokens = pl.ds(c * tiles.compute, tiles.compute)
        x_ND = x_ref[tokens, :]
        s_VN = dot(w_ref[...], x_ND, ROWS_BY_ROWS) * scale
        row = j * tiles.v + jax.lax.broadcasted_iota(jnp.int32, s_VN.shape, 0)
        hit = row == target_ref[:, tokens]
        ds_VN = dlse_ref[:, tokens] * jnp.exp(s_VN - lse_ref[:, tokens]) + jnp.where(hit, dpicked_ref[:, tokens], 0.0)
        acc_ref[...] += dot(ds_VN.astype(x_ND.dtype), x_ND, ROWS_BY_COLUMNS)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        dw_ref[...] = (acc_ref[...] * scale).astype(dw_ref.dtype)


def _call(kernel, name: str, products: int, grid, specs, outputs, scratch, x_ND, w_VD, tiles: Tiles, interpret):
    (N, D), V = x_ND.shape, w_VD.shape[0]
    passes = N // tiles.n  # over w, or for dw as many blocks of w over x
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0, grid=grid, in_specs=specs[0], out_specs=specs[1], scratch_shapes=scratch
        ),
        out_shape=outputs,
        cost_estimate=pl.CostEstimate(
            flops=2 * products * N * D * V, transcendentals=N * V, bytes_accessed=2 * x_ND.nbytes + passes * w_VD.nbytes
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiles.vmem_bytes
        ),
        interpret=interpret,
    )


def forward(x_ND, w_VD, target_N, scale: float, with_entropy: bool, *, tiles: Tiles | None = None, interpret=False):
    """(picked_N, lse_N, entropy_N), float32; `picked` is the target's logit, and 0 for one outside the vocabulary.

    The entropy means nothing unless it was asked for.
    """
    x_ND, target_1N, tiles, N = _prepared(x_ND, w_VD, target_N, tiles)
    V, D = w_VD.shape
    per_token = pl.BlockSpec((1, tiles.n), lambda i, j: (0, i))
    x, w = pl.BlockSpec((tiles.n, D), lambda i, j: (i, 0)), pl.BlockSpec((tiles.v, D), lambda i, j: (j, 0))
    values = _call(
        functools.partial(_forward_kernel, tiles=tiles, V=V, scale=scale, with_entropy=with_entropy),
        "loss_head_forward",
        1,
        (x_ND.shape[0] // tiles.n, pl.cdiv(V, tiles.v)),
        ([per_token, x, w], [per_token] * 3),
        [jax.ShapeDtypeStruct(target_1N.shape, jnp.float32)] * 3,
        [pltpu.VMEM((SUBLANES, tiles.n), jnp.float32)] * 4,
        *(x_ND, w_VD, tiles, interpret),
    )(target_1N, x_ND, w_VD)
    return tuple(value[0, :N] for value in values)


def gradients(
    x_ND, w_VD, target_N, lse_N, dpicked_N, dlse_N, scale: float, *, tiles: Tiles | None = None, interpret=False
):  # fmt: skip
    """(dx_ND, dw_VD) from what the forward pass saw and gave, and the gradients of the target's logit and of lse."""
    x_ND, target_1N, tiles, N = _prepared(x_ND, w_VD, target_N, tiles)
    V, D = w_VD.shape
    # Tokens that are padding have gradients 0, and finite logits.
    tokens = [target_1N, *(jnp.pad(v, (0, x_ND.shape[0] - N))[None] for v in (lse_N, dpicked_N, dlse_N))]
    blocks_n, blocks_v = x_ND.shape[0] // tiles.n, pl.cdiv(V, tiles.v)

    def specs(of_n, of_v):
        per_token = pl.BlockSpec((1, tiles.n), lambda *i: (0, of_n(*i)))
        x, w = (
            pl.BlockSpec((size, D), lambda *i, of=of: (of(*i), 0)) for size, of in ((tiles.n, of_n), (tiles.v, of_v))
        )
        return [per_token] * 4 + [x, w], x, w

    inputs, x, _ = specs(lambda i, j: i, lambda i, j: j)
    column = (tiles.n, LANES)
    dx_ND = _call(
        functools.partial(_dx_kernel, tiles=tiles, V=V, scale=scale),
        "loss_head_dx",
        2,
        (blocks_n, blocks_v),
        (inputs, x),
        jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype),
        [pltpu.VMEM(column, jnp.int32), *[pltpu.VMEM(column, jnp.float32)] * 3, pltpu.VMEM((tiles.n, D), jnp.float32)],
        *(x_ND, w_VD, tiles, interpret),
    )(*tokens, x_ND, w_VD)
    inputs, _, w = specs(lambda j, i: i, lambda j, i: j)
    dw_VD = _call(
        functools.partial(_dw_kernel, tiles=tiles, scale=scale),
        "loss_head_dw",
        2,
        (blocks_v, blocks_n),
        (inputs, w),
        jax.ShapeDtypeStruct(w_VD.shape, w_VD.dtype),
        [pltpu.VMEM((tiles.v, D), jnp.float32)],
        *(x_ND, w_VD, tiles, interpret),
    )(*tokens, x_ND, w_VD)
    return dx_ND[:N], dw_VD


def _prepared(x_ND, w_VD, target_N, tiles: Tiles | None):
    """(x_ND and target_1N, padded to whole tiles, the tiles, the tokens that are none of the padding)."""
    (N, D), V = x_ND.shape, w_VD.shape[0]
    if not takes(x_ND, w_VD):
        raise ValueError(
            f"token_logprobs: the tpu backend takes a width that divides by {LANES}, all bfloat16 or all float32, not"
            f" x {x_ND.dtype} [{N}, {D}] and w {w_VD.dtype}"
        )
    tiles = (tiles or TILES[x_ND.dtype]).fit(N, V)
    rest = -N % tiles.n
    # A target elsewhere equals no row, of those beyond the vocabulary neither.
    target_N = jnp.where((target_N >= 0) & (target_N < V), target_N, -1).astype(jnp.int32)
    return jnp.pad(x_ND, ((0, rest), (0, 0))), jnp.pad(target_N, (0, rest))[None], tiles, N


def takes(x: jax.Array, w_VD: jax.Array) -> bool:
    """Whether the kernels have tiles for them."""
    return w_VD.shape[1] % LANES == 0 and x.dtype == w_VD.dtype and x.dtype in TILES


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def token_logprobs(
    x_BSD, w_VD, target_BS, scale: float, with_entropy: bool, tiles: Tiles | None = None, interpret=False
):
    """See `api.token_logprobs`. Takes widths that divide by 128; `interpret` as in `pl.pallas_call`."""
    return values(x_BSD, w_VD, target_BS, scale, with_entropy, tiles, interpret)


def values(x_BSD, w_VD, target_BS, scale: float, with_entropy: bool, tiles: Tiles | None = None, interpret=False):
    """`token_logprobs` without its derivative."""
    rows = x_BSD.reshape(-1, x_BSD.shape[-1]), w_VD, target_BS.reshape(-1)
    picked_N, lse_N, entropy_N = forward(*rows, scale, with_entropy, tiles=tiles, interpret=interpret)
    found = (picked_N - lse_N, lse_N, entropy_N)[: 2 + with_entropy]
    return tuple(value_N.reshape(target_BS.shape) for value_N in found)


def pull(x_BSD, w_VD, target_BS, lse_BS, dlogp_BS, dlse_BS, scale: float, tiles: Tiles | None = None, interpret=False):
    """(dx_BSD, dw_VD) from the gradients of logp and lse; the entropy has none."""
    flat = (v.reshape(-1) for v in (target_BS, lse_BS, dlogp_BS, dlse_BS - dlogp_BS))
    rows = x_BSD.reshape(-1, x_BSD.shape[-1]), w_VD, *flat
    dx_ND, dw_VD = gradients(*rows, scale, tiles=tiles, interpret=interpret)
    return dx_ND.reshape(x_BSD.shape), dw_VD


def _forward(x_BSD, w_VD, target_BS, scale, with_entropy, tiles, interpret):
    found = values(x_BSD, w_VD, target_BS, scale, with_entropy, tiles, interpret)
    return found, (x_BSD, w_VD, target_BS, found[1])


def _backward(scale, with_entropy, tiles, interpret, saved, cotangents):
    return *pull(*saved, *cotangents[:2], scale, tiles, interpret), None


token_logprobs.defvjp(_forward, _backward)
