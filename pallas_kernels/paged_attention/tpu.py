"""Paged attention as a Pallas TPU kernel: each row's pages are fetched by its table, and none that no query sees.

A block of pages of all key/value heads comes in one wave of copies, each page's keys in one and its values in another,
while the block before is used; the first block of the next row comes while the last one of this row is used. Rows are
in two chains, for the two cores of a v5p. Scores of the query heads that share a key/value head are one product.
Source: Kwon et al., PagedAttention (2023), for pages; Dao, FlashAttention-2 (2023), for the running softmax.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_common import FLOOR, HIDDEN, LANES, ROWS_BY_COLUMNS, ROWS_BY_ROWS, dot, seen, widen
from pallas_kernels.paged_attention import rows
from pallas_kernels.paged_attention.rows import COLUMNS, schedule

# Tokens of a block: 4 MiB of VMEM in bfloat16 for North's four heads, twice.
BLOCK = 512
# Rows of queries of one key/value head: what lies in VMEM beside it.
MOST_QUERIES = 1024


def pages_of(P: int, W: int, block: int) -> int:
    """Pages of P tokens in a block of so many, where tables have W; a table may be less than a block."""
    n = max(LANES // P, min(block // P, W))
    return -(-n * P // LANES) * LANES // P


def chains_of(B: int) -> int:
    """Chains that B rows are walked in."""
    return 2 - B % 2


def side_by_side(M: int) -> bool:
    """Whether the key/value heads of a block are one body, by the rows of queries of each."""
    return M <= LANES


def _slot(step):
    """Which of the two buffers holds a block, by its place in the chain."""
    return jax.lax.rem(step, 2)


def _kernel(
    rows_ref, table_ref, next_table_ref, q_ref, start_ref, end_ref, k_hbm, v_hbm, out_ref, k_buf, v_buf, arrived,
    m_ref, l_ref, acc_ref, *, scale: float,
):  # fmt: skip
    b = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    B = pl.num_programs(0) * pl.num_programs(1)
    _, G, n, P, K = k_buf.shape

    def of(row, column):
        return rows_ref[row * COLUMNS + column]

    def each_page(row, table, j, slot, use):
        """use(copy) for the pages of block j of a row that any of its queries sees."""
        first = jnp.maximum(jax.lax.div(of(row, rows.LOW), P), j * n)
        end = jnp.minimum(jax.lax.div(of(row, rows.HIGH) + P - 1, P), (j + 1) * n)

        def one(w, _):
            page, i = table[0, 0, w], w - j * n
            use(pltpu.make_async_copy(k_hbm.at[:, page], k_buf.at[slot, :, i], arrived.at[slot, 0]))
            use(pltpu.make_async_copy(v_hbm.at[:, page], v_buf.at[slot, :, i], arrived.at[slot, 1]))

        jax.lax.fori_loop(first, end, one, None)

    def fetch(row, table, j, slot):
        each_page(row, table, j, slot, lambda copy: copy.start())

    def each_head(use):
        # Side by side where a head is short: they wait for each other's products less.
        jax.lax.fori_loop(0, G, lambda g, _: use(g), None, unroll=side_by_side(q_ref.shape[2]))

    first, end, step, following = (of(b, column) for column in (rows.FIRST, rows.END, rows.STEP, rows.NEXT))
    m_ref[...] = jnp.full_like(m_ref, FLOOR)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    # Nobody fetched the first block of a chain ahead.
    pl.when((first < end) & (step == 0))(lambda: fetch(b, table_ref, first, 0))

    def attend(g, j, slot, masked: bool):
        keys = [buf[slot, g].astype(q_ref.dtype).reshape(n * P, K) for buf in (k_buf, v_buf)]
        k_TK, v_TK = keys
        s_MT = dot(q_ref[0, g], k_TK, ROWS_BY_ROWS) * scale
        if masked:
            # What no query sees was not fetched, and may not be a number.
            token = j * n * P + jax.lax.broadcasted_iota(jnp.int32, v_TK.shape, 0)
            v_TK = jnp.where((token >= of(b, rows.LOW)) & (token < of(b, rows.HIGH)), v_TK, 0)
            start, stop = (widen(ref[0], n * P) for ref in (start_ref, end_ref))
            s_MT = jnp.where(seen(start, stop, j * n * P, s_MT.shape, 1), s_MT, HIDDEN)
        before_ML = m_ref[g]
        m_ML = jnp.maximum(before_ML, jnp.max(s_MT, axis=1, keepdims=True))
        p_MT = jnp.exp(s_MT - widen(m_ML, n * P))
        fade_ML = jnp.exp(before_ML - m_ML)
        m_ref[g] = m_ML
        l_ref[g] = fade_ML * l_ref[g] + jnp.sum(p_MT, axis=1, keepdims=True)
        acc_ref[g] = widen(fade_ML, K) * acc_ref[g] + dot(p_MT.astype(v_TK.dtype), v_TK, ROWS_BY_COLUMNS)

    def block(j, _):
        slot, other = _slot(step + j - first), _slot(step + j - first + 1)
        last = j + 1 == end
        pl.when(jnp.logical_not(last))(lambda: fetch(b, table_ref, j + 1, other))
        row = jnp.minimum(following, B - 1)
        pl.when(last & (following < B))(lambda: fetch(row, next_table_ref, of(row, rows.FIRST), other))
        each_page(b, table_ref, j, slot, lambda copy: copy.wait())
        whole = (of(b, rows.WHOLE_FIRST) <= j) & (j < of(b, rows.WHOLE_END))
        for case, masked in ((whole, False), (jnp.logical_not(whole), True)):
            pl.when(case)(lambda masked=masked: each_head(lambda g: attend(g, j, slot, masked)))

    jax.lax.fori_loop(first, end, block, None)

    def finish(g):
        l_ML = l_ref[g]
        out_ref[0, g] = (acc_ref[g] / widen(jnp.where(l_ML > 0, l_ML, 1.0), K)).astype(out_ref.dtype)

    each_head(finish)


def paged_attention(
    q_BSHK: jax.Array,
    k_GXPK: jax.Array,
    v_GXPK: jax.Array,
    table_BW: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    *,
    block: int = BLOCK,
    interpret=False,
) -> jax.Array:
    """See `api.paged_attention`. `block`: tokens; `interpret` as in `pl.pallas_call`."""
    if problem := unfit(q_BSHK, k_GXPK):
        raise ValueError(f"paged_attention: the tpu backend {problem}")
    B, S, H, K = q_BSHK.shape
    G, _, P, _ = k_GXPK.shape
    W, M, chains = table_BW.shape[1], S * H // G, chains_of(B)
    n = pages_of(P, W, block)

    def per_query(x_BS):
        x_BSR = jnp.broadcast_to(x_BS[:, :, None], (B, S, H // G))
        return jnp.broadcast_to(x_BSR.reshape(B, M, 1), (B, M, LANES)).astype(jnp.int32)

    q_BGMK = q_BSHK.reshape(B, S, G, H // G, K).swapaxes(1, 2).reshape(B, G, M, K)

    def row(*shape, of=lambda b, _: b, **where):
        return pl.BlockSpec((1, *shape), lambda c, i, ref: (of(c * (B // chains) + i, ref), *[0] * len(shape)), **where)

    def following(b, rows_ref):
        return jnp.minimum(rows_ref[b * COLUMNS + rows.NEXT], B - 1)

    tables = [row(1, W, memory_space=pltpu.SMEM), row(1, W, of=following, memory_space=pltpu.SMEM)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_BGMK = pl.pallas_call(
        functools.partial(_kernel, scale=K**-0.5),
        name="paged_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chains, B // chains),
            in_specs=[*tables, row(G, M, K), row(M, LANES), row(M, LANES), anywhere, anywhere],
            out_specs=row(G, M, K),
            scratch_shapes=[
                pltpu.VMEM((2, G, n, P, K), k_GXPK.dtype),
                pltpu.VMEM((2, G, n, P, K), v_GXPK.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((G, M, LANES), jnp.float32),
                pltpu.VMEM((G, M, LANES), jnp.float32),
                pltpu.VMEM((G, M, K), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BGMK.shape, q_BSHK.dtype),
        cost_estimate=pl.CostEstimate(  # of full tables
            flops=4 * B * S * H * W * P * K,
            transcendentals=B * S * H * W * P,
            bytes_accessed=2 * B * W * P * G * K * k_GXPK.dtype.itemsize + 2 * q_BSHK.nbytes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20
        ),
        interpret=interpret,
    )(
        schedule(start_BS, end_BS, W * P, n * P, chains).reshape(-1),
        *[table_BW[:, None].astype(jnp.int32)] * 2,
        *(q_BGMK, per_query(start_BS), per_query(end_BS), k_GXPK, v_GXPK),
    )
    return out_BGMK.reshape(B, G, S, H // G, K).swapaxes(1, 2).reshape(B, S, H, K)


def unfit(q_BSHK: jax.Array, k_GXPK: jax.Array) -> str | None:
    """Why the kernel does not take these, or None."""
    _, S, H, K = q_BSHK.shape
    G, _, P, _ = k_GXPK.shape
    if K % LANES:
        return f"takes heads whose width divides by {LANES}, not {K}"
    if P % 8 or (P % LANES and LANES % P):
        return f"takes pages of 8, 16, 32, 64 or a multiple of {LANES} tokens, not {P}"
    if S * H // G > MOST_QUERIES:
        return f"takes {MOST_QUERIES} queries of one key/value head at most, not {S} tokens of {H // G} heads"
    return None
