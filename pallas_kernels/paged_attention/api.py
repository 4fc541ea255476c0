"""The public function: it checks its arguments, then calls one backend by name."""

import jax

from pallas_kernels.paged_attention import auto, reference, tpu

BACKENDS = {"reference": reference, "tpu": tpu, "auto": auto}


def paged_attention(
    q_BSHK: jax.Array,
    k_GXPK: jax.Array,
    v_GXPK: jax.Array,
    table_BW: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """out_BSHK: softmax(q·k / sqrt(K)) v over the keys start <= t < end of each query, t counted along the row's table.

    Key t of row b is token t % P of page table_BW[b, t // P] of the pools k and v, whose type may be narrower than q's:
    float32, bfloat16 or float8_e4m3fn. Query head h reads key/value head h // (H / G). So a query at position p of a
    row whose table begins at position o has end = p - o + 1, and start = end - window, or 0 where all is seen. What a
    query without keys gets means nothing; entries of the table that no query needs may hold any page.

    `backend` is "reference" (gathers every page of the tables), "tpu" (our kernel, for one device: fetches only pages
    that a query of the row sees), or "auto" (that where the program is compiled for a TPU and the kernel takes the
    shapes, else "reference"). Not differentiable but by "reference". Raises ValueError on an unknown backend and on
    shapes that do not fit or that the backend does not take.
    """
    if backend not in BACKENDS:
        raise ValueError(f"paged_attention: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    B, S, H, K = q_BSHK.shape
    G = k_GXPK.shape[0]
    fits = k_GXPK.shape == v_GXPK.shape and k_GXPK.shape[3] == K and H % G == 0 and table_BW.shape[0] == B
    if not fits or start_BS.shape != (B, S) or end_BS.shape != (B, S):
        raise ValueError(
            f"paged_attention: q {q_BSHK.shape}, k {k_GXPK.shape}, v {v_GXPK.shape}, table {table_BW.shape}, spans"
            f" {start_BS.shape} and {end_BS.shape} do not fit; pass [B, S, H, K], [G, X, P, K] twice, G dividing H,"
            " [B, W], and [B, S] twice"
        )
    return BACKENDS[backend].paged_attention(q_BSHK, k_GXPK, v_GXPK, table_BW, start_BS, end_BS)
