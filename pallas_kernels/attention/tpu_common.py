"""What the TPU kernels of attention share: tiles, products, masks, and the walk over blocks that are fetched ahead."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOG2E = math.log2(math.e)
# A hidden key's score lies far below the smallest running maximum: its weight is 0, not 1, even where all are hidden.
FLOOR, HIDDEN = -1e30, -2e30
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a_MK, b_NK -> MN
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))  # a_MK, b_KN -> MN


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys of a block, keys (for dk and dv: queries) multiplied at once, and bytes of VMEM."""

    q: int = 1024
    k: int = 1024
    compute: int = 512
    vmem_bytes: int = 48 * 2**20

    def fit(self, S: int, T: int) -> "Tiles":
        """These tiles, no larger than what S queries and T keys fill."""
        compute = min(self.compute, round_up(max(S, T), LANES))
        q, k = (min(tile, round_up(n, compute)) for tile, n in ((self.q, S), (self.k, T)))
        return dataclasses.replace(self, q=q, k=k, compute=compute)


def padded(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, tiles: Tiles):
    """The same arrays with S and T grown to what the tiles divide, and the tiles, which are no larger than needed.

    Keys that are padding lie beyond every span, and queries that are padding have an empty one.
    """
    T = k_BTGK.shape[1]
    tiles = tiles.fit(q_BSHK.shape[1], T)
    q_BSHK, start_BS, end_BS = (grown(x, tiles.q) for x in (q_BSHK, start_BS, jnp.minimum(end_BS, T)))
    return q_BSHK, grown(k_BTGK, tiles.k), grown(v_BTGK, tiles.k), start_BS, end_BS, tiles


def grown(x: jax.Array, tile: int) -> jax.Array:
    """x with zeros up to a multiple of `tile` along axis 1."""
    extra = -x.shape[1] % tile
    return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) if extra else x


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def dot(a: jax.Array, b: jax.Array, dimensions) -> jax.Array:
    """A matrix product with float32 accumulation, exact in its inputs."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def as_columns(row_1Q: jax.Array) -> jax.Array:
    """[1, Q] -> [Q, 128]: one number per row, in all its lanes."""
    return jnp.broadcast_to(row_1Q, (LANES, row_1Q.shape[1])).T


def widen(column_QL: jax.Array, width: int) -> jax.Array:
    """[Q, 128] of equal lanes -> [Q, width]."""
    return jnp.tile(column_QL, (1, width // LANES))


def seen(start, end, first, shape: tuple[int, int], axis: int) -> jax.Array:
    """Whether the keys from `first` on, counted along `axis`, are within their queries' spans."""
    key = first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return (key >= start) & (key < end)


def walk(first, end, copies, use) -> None:
    """use(j, slot) for j = first … end - 1, after `copies(j, slot)` have arrived; the next are on their way."""

    @pl.when(first < end)
    def _():
        for copy in copies(first, 0):
            copy.start()

    def step(j, _):
        slot = jax.lax.rem(j - first, 2)

        @pl.when(j + 1 < end)
        def _():
            for copy in copies(j + 1, 1 - slot):
                copy.start()

        for copy in copies(j, slot):
            copy.wait()
        use(j, slot)

    jax.lax.fori_loop(first, end, step, None)


def fetch_keys(b, g, tiles: Tiles, hbm_refs, buffers, arrived):
    """For `walk`: the copies of block j of a key/value head's keys and values from [B, T, G * K] to a slot."""
    K = buffers[0].shape[-1]

    def copies(j, slot):
        at = b, pl.ds(pl.multiple_of(j * tiles.k, tiles.k), tiles.k), lanes(g, K)
        return [
            pltpu.make_async_copy(hbm.at[at], buf.at[slot], arrived.at[slot, n])
            for n, (hbm, buf) in enumerate(zip(hbm_refs, buffers, strict=True))
        ]

    return copies


def whole_or_masked(whole, use) -> None:
    """use(masked=False) where the block is seen whole, else use(masked=True)."""
    pl.when(whole)(lambda: use(masked=False))
    pl.when(jnp.logical_not(whole))(lambda: use(masked=True))


def each_head(heads: int, use) -> None:
    """use(h) for every head in turn. Two side by side would fill a few more slots, and compile nine times as long."""

    def one(h, _):
        use(h)

    jax.lax.fori_loop(0, heads, one, None)


def lanes(h, K: int) -> pl.Slice:
    """Head h of an array [.., heads * K]."""
    return pl.ds(pl.multiple_of(h * K, K), K)
