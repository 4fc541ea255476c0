"""The public functions: the span of keys of every query, and attention over it by one backend by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import auto, gpu, reference, tpu, xla

BACKENDS = {module.__name__.rpartition(".")[2]: module.attention for module in (auto, gpu, reference, tpu, xla)}


def spans(S: int, *, window: int | None = None, segment_ids_BS: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(start_BS, end_BS) of causal attention in a row of S tokens, int32 [B or 1, S].

    Query i sees start <= j < end: j <= i, the last `window` of them, and no earlier than the first token of its run of
    equal segment ids. Documents lie in one piece, so a run is a document.
    """
    index_1S = jnp.arange(S, dtype=jnp.int32)[None]
    start_BS = jnp.zeros_like(index_1S)
    if segment_ids_BS is not None:
        first_BS = segment_ids_BS != jnp.pad(segment_ids_BS, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        start_BS = jax.lax.cummax(jnp.where(first_BS, index_1S, 0), axis=1)
    if window is not None:
        start_BS = jnp.maximum(start_BS, index_1S - window + 1)
    return start_BS, jnp.broadcast_to(index_1S + 1, start_BS.shape)


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    *,
    backend: str = "auto",
    scale: float | None = None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out_BSHK, lse_BHS): softmax(scale q·k) v over the keys start <= j < end of each query, and the log-sum-exp.

    out = Σ_j exp(s_j - lse) v_j and lse = log Σ_j exp(s_j) with s_j = scale · q·k_j, natural logarithm, float32. Query
    head h reads key/value head h // (H / G). A query without keys gives 0 and -inf. `scale` is 1/sqrt(K) if not given.
    `start_BS` and `end_BS` are int32 and count keys of this call, [B or 1, S]; they may lie outside 0 … T. So a call on
    a piece of the keys, its spans shifted by where the piece begins, gives a piece of the result; pieces combine as
    lse = log Σ exp(lse_i), out = Σ exp(lse_i - lse) out_i. Both outputs are differentiable in q, k and v.

    `window` promises that query i sees no key outside i - window < j <= i, which spares XLA's products most of their
    work; the kernels look at the spans themselves. `backend` "auto" is "tpu" or "gpu" where the program is compiled for
    one and the kernels take the arrays (heads of a multiple of 128, or 64; on a GPU bfloat16 or float16), else "xla".
    Raises ValueError on an unknown backend and on shapes that do not fit or that the backend does not take.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    B, S, H, K = q_BSHK.shape
    G = k_BTGK.shape[2]
    fits = k_BTGK.shape == v_BTGK.shape and k_BTGK.shape[::3] == (B, K) and H % G == 0
    if not fits or not start_BS.shape == end_BS.shape or start_BS.shape not in ((B, S), (1, S)):
        raise ValueError(
            f"attention: q {q_BSHK.shape}, k {k_BTGK.shape}, v {v_BTGK.shape}, spans {start_BS.shape} and"
            f" {end_BS.shape} do not fit; pass [B, S, H, K], [B, T, G, K] twice, G dividing H, and [B or 1, S] twice"
        )
    start_BS, end_BS = (jnp.broadcast_to(x.astype(jnp.int32), (B, S)) for x in (start_BS, end_BS))
    scale = K**-0.5 if scale is None else scale
    promise = {"window": window} if backend in ("auto", "xla") else {}
    return BACKENDS[backend](q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, scale, **promise)
