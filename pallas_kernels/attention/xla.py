"""XLA's products under a mask, on any platform. Spans known to lie in a window cost S * window, others S * T."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.rule import differentiable

# Parts that a causal row is computed in, and the least queries of one.
PARTS, PART = 4, 32


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    scale: float,
    *,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.attention`. Scores and softmax are float32; the gradients compute the scores again."""
    how = {"scale": scale, "window": window}
    both = differentiable(functools.partial(forward, **how), functools.partial(backward, **how))
    return both(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS)


def forward(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, *, scale: float, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(out_BSHK, lse_BHS) of `api.attention`."""
    parts = [
        _forward(q_BSHK[:, a:b], k_BTGK[:, :t], v_BTGK[:, :t], start_BS[:, a:b], end_BS[:, a:b], scale, window)
        for a, b, t in causal_parts(q_BSHK.shape[1], k_BTGK.shape[1], window)
    ]
    outs_BSHK, lses_BHS = zip(*parts, strict=True)
    return jnp.concatenate(outs_BSHK, axis=1), jnp.concatenate(lses_BHS, axis=2)


def _forward(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, scale: float, window: int | None):
    B, S, H, K = q_BSHK.shape
    s = block_length(S, k_BTGK.shape[1], window)
    q_GNMK = _queries(_blocks(q_BSHK * scale, s), k_BTGK.shape[2])
    k_GNTK, v_GNTK = (_keys(x_BTGK, s) for x_BTGK in (k_BTGK, v_BTGK))
    seen_NST = _seen(start_BS, end_BS, k_GNTK.shape[2], s)
    scores_GNRST = _scores(q_GNMK, k_GNTK, seen_NST)
    any_NS1 = jnp.any(seen_NST, axis=-1, keepdims=True)
    # A query without keys: its scores become 0 before the softmax, and its results are set after it.
    peak_GNRS1 = jnp.where(any_NS1[:, None], jnp.max(scores_GNRST, axis=-1, keepdims=True), 0.0)
    p_GNRST = jnp.exp(scores_GNRST - peak_GNRS1)
    total_GNRS1 = jnp.where(any_NS1[:, None], jnp.sum(p_GNRST, axis=-1, keepdims=True), 1.0)
    weights_GNMT = (p_GNRST / total_GNRS1).reshape(*q_GNMK.shape[:3], -1).astype(v_BTGK.dtype)
    out_GNMK = jnp.einsum("GNMT,GNTK->GNMK", weights_GNMT, v_GNTK)
    lse_GNRS1 = jnp.where(any_NS1[:, None], peak_GNRS1 + jnp.log(total_GNRS1), -jnp.inf)
    lse_BSH1 = _per_query(lse_GNRS1, (B, S, H, 1))
    return _per_query(out_GNMK, (B, S, H, K)).astype(q_BSHK.dtype), lse_BSH1[..., 0].transpose(0, 2, 1)


def backward(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, out_BSHK, lse_BHS, dout_BSHK, dlse_BHS,
    *, scale: float, window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(dq_BSHK, dk_BTGK, dv_BTGK), with p = exp(s - lse) and ds = p (do v^T - Σ do · out + dlse)."""
    T = k_BTGK.shape[1]
    dqs_BSHK, sums = [], []
    for a, b, t in reversed(causal_parts(q_BSHK.shape[1], T, window)):
        own = (x_BS[:, a:b] for x_BS in (start_BS, end_BS, out_BSHK))
        dq_BSHK, *both = _backward(
            q_BSHK[:, a:b], k_BTGK[:, :t], v_BTGK[:, :t], *own, lse_BHS[:, :, a:b], dout_BSHK[:, a:b],
            dlse_BHS[:, :, a:b], scale, window,
        )  # fmt: skip
        dqs_BSHK.append(dq_BSHK)
        # The last part, which comes first, sees all keys.
        sums = both if t == T else [x_BTGK.at[:, :t].add(dx) for x_BTGK, dx in zip(sums, both, strict=True)]
    return jnp.concatenate(dqs_BSHK[::-1], axis=1), *sums


def _backward(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, out_BSHK, lse_BHS, dout_BSHK, dlse_BHS, scale: float, window: int | None
):
    G = k_BTGK.shape[2]
    s = block_length(q_BSHK.shape[1], k_BTGK.shape[1], window)
    delta_BSH = jnp.einsum("BSHK,BSHK->BSH", dout_BSHK, out_BSHK, preferred_element_type=jnp.float32)
    delta_BSH -= dlse_BHS.transpose(0, 2, 1)
    # 0 in place of -inf: a query without keys has no score above -inf.
    lse_BSH = jnp.where(jnp.isneginf(lse_BHS), 0.0, lse_BHS).transpose(0, 2, 1)
    q_GNMK, dout_GNMK = (_queries(_blocks(x, s), G) for x in (q_BSHK * scale, dout_BSHK))
    (k_GNTK, untwist), v_GNTK = jax.vjp(functools.partial(_keys, s=s), k_BTGK), _keys(v_BTGK, s)
    scores_GNRST = _scores(q_GNMK, k_GNTK, _seen(start_BS, end_BS, k_GNTK.shape[2], s))
    lse_GNRS1, delta_GNRS1 = (
        _queries(_blocks(x_BSH[..., None], s), G).reshape(*scores_GNRST.shape[:4], 1) for x_BSH in (lse_BSH, delta_BSH)
    )
    p_GNRST = jnp.exp(scores_GNRST - lse_GNRS1)
    dp_GNMT = jnp.einsum("GNMK,GNTK->GNMT", dout_GNMK, v_GNTK, preferred_element_type=jnp.float32)
    ds_GNRST = p_GNRST * (dp_GNMT.reshape(p_GNRST.shape) - delta_GNRS1)
    p_GNMT, ds_GNMT = (x.reshape(dp_GNMT.shape).astype(q_BSHK.dtype) for x in (p_GNRST, ds_GNRST))
    dq_GNMK = jnp.einsum("GNMT,GNTK->GNMK", ds_GNMT, k_GNTK)
    dk_GNTK = jnp.einsum("GNMT,GNMK->GNTK", ds_GNMT, q_GNMK)
    dv_GNTK = jnp.einsum("GNMT,GNMK->GNTK", p_GNMT, dout_GNMK)
    return _per_query(dq_GNMK, q_BSHK.shape) * scale, *untwist(dk_GNTK), *untwist(dv_GNTK)


def causal_parts(S: int, T: int, window: int | None) -> list[tuple[int, int, int]]:
    """(first, end, keys): queries first to end see no key from `keys` on. All of them at once where that is not known.

    A window says that no query sees what comes after it: its parts of S / n queries cost (n + 1) / 2n of S * T.
    """
    known = window is not None and S == T and block_length(S, T, window) is None
    n = next(n for n in range(PARTS if known else 1, 0, -1) if S % n == 0 and (n == 1 or S // n >= PART))
    return [(i * (S // n), (i + 1) * (S // n), T // n * (i + 1)) for i in range(n)]


def block_length(S: int, T: int, window: int | None) -> int | None:
    """Tokens of a block of a windowed row; None where blocks would spare nothing.

    Blocks of s >= window - 1 tokens become rows (N = B * S / s): a block sees itself and the one before, 2s keys
    instead of T.
    """
    if window is None or S != T:
        return None
    return next((s for s in (window - 1, window) if s > 0 and S % s == 0 and 2 * s < S), None)


def _blocks(x_BS: jax.Array, s: int | None) -> jax.Array:
    """[B, S, …] -> [N, s, …]."""
    return x_BS if s is None else x_BS.reshape(-1, s, *x_BS.shape[2:])


def _queries(x_NSHK: jax.Array, G: int) -> jax.Array:
    """[G, N, R * S, K]: the query heads of one key/value head are rows of one matrix, so no key is ever repeated."""
    N, S, H, K = x_NSHK.shape
    return x_NSHK.reshape(N, S, G, H // G, K).transpose(2, 0, 3, 1, 4).reshape(G, N, -1, K)


def _per_query(x_GN: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The way back of `_queries` and `_blocks`, to [B, S, H, K]."""
    (G, N), (B, S, H, K) = x_GN.shape[:2], shape
    return x_GN.reshape(G, N, H // G, -1, K).transpose(1, 3, 0, 2, 4).reshape(B, S, H, K)


def _keys(x_BTGK: jax.Array, s: int | None) -> jax.Array:
    """[G, N, T, K]; of blocks, T = 2s: each is preceded by the block before, the first one by zeros."""
    if s is not None:
        x_BnsGK = x_BTGK.reshape(x_BTGK.shape[0], -1, s, *x_BTGK.shape[2:])
        before = jnp.pad(x_BnsGK[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        x_BTGK = jnp.concatenate([before, x_BnsGK], axis=2).reshape(-1, 2 * s, *x_BTGK.shape[2:])
    return x_BTGK.transpose(2, 0, 1, 3)


def _seen(start_BS: jax.Array, end_BS: jax.Array, T: int, s: int | None) -> jax.Array:
    """[N, S, T]: which of the keys that `_keys` gives are within the spans."""
    key_T = jnp.arange(T, dtype=jnp.int32)
    if s is None:
        return (key_T >= start_BS[..., None]) & (key_T < end_BS[..., None])
    B, S = start_BS.shape
    # The first block has none before it: what stands there lies before key 0.
    first_N1 = jnp.tile((jnp.arange(S // s, dtype=jnp.int32) - 1) * s, B)[:, None]
    start_Ns, end_Ns = (_blocks(x_BS, s) - first_N1 for x_BS in (jnp.maximum(start_BS, 0), end_BS))
    return (key_T >= start_Ns[..., None]) & (key_T < end_Ns[..., None])


def _scores(q_GNMK: jax.Array, k_GNTK: jax.Array, seen_NST: jax.Array) -> jax.Array:
    """q · k in float32, [G, N, R, S, T]; -inf where unseen."""
    N, S, T = seen_NST.shape
    scores_GNMT = jnp.einsum("GNMK,GNTK->GNMT", q_GNMK, k_GNTK, preferred_element_type=jnp.float32)
    return jnp.where(seen_NST[:, None], scores_GNMT.reshape(q_GNMK.shape[0], N, -1, S, T), -jnp.inf)
