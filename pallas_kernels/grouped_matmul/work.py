"""What grouped products cost, by count and without running them: FLOPs, bytes, and products of each size.

A FLOP is one addition or one multiplication, so a product of [M, N] by [N, L] has 2 M N L.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.schedule import computed_rows, schedule, unit_rows
from pallas_kernels.grouped_matmul.shapes import Shape
from pallas_kernels.grouped_matmul.tiles import TILES, Tiles, cut


@dataclasses.dataclass(frozen=True)
class Work:
    """What one kernel has to do.

    flops: of its products over the groups' rows. bytes: inputs and outputs, once. fetched: bytes with the rows that
    its schedule reads again. rows: rows that it multiplies, those of other groups in a shared unit with them. passes:
    products of each size and block of columns, in the order of the kernel's program.
    """

    flops: int
    bytes: int
    fetched: int
    rows: int
    passes: tuple[int, ...] = ()


def flops(rows: int, D: int, F: int) -> tuple[int, int]:
    """(forward, backward) FLOPs of one grouped product of so many rows: 2 · rows · D · F, and twice that.

    Exact for any sizes of the groups; a gated pair has twice as many. This is the count for a model's utilisation.
    """
    return 2 * rows * D * F, 4 * rows * D * F


def uniform_sizes(P: int, E: int, seed: int = 0) -> np.ndarray:
    """Group sizes of P rows that each choose one of E groups with equal chances, int32 [E]."""
    return np.random.default_rng(seed).multinomial(P, np.full(E, 1 / E)).astype(np.int32)


def pieces(counts_G: np.ndarray, rows: int, unit: int, piece: int, *, split: bool) -> tuple[int, ...]:
    """How many products of each size `tpu._each_piece` makes of visits of so many rows, in its order."""
    piece = unit << ((min(piece, rows) // unit).bit_length() - 1)
    whole, rest = counts_G // piece, counts_G % piece
    if split:
        below = [piece >> n for n in range(1, 16) if piece >> n >= unit]
        return int(whole.sum()), *(int(((rest & size) != 0).sum()) for size in below)
    return int(whole.sum()), *(int((rest == size).sum()) for size in range(unit, piece, unit))


def kernels(shape: Shape, platform: str, tiles: Tiles | None = None) -> dict[str, Work]:
    """The work of our kernels on a named shape in bfloat16, by kernel, with rows shared out evenly by chance.

    {} on a GPU, whose kernels cut their arrays otherwise.
    """
    if platform != "tpu":
        return {}
    tiles = tiles or TILES[jnp.dtype(jnp.bfloat16)]
    P, D, F, E = shape.P, shape.D, shape.F, shape.E
    sizes = uniform_sizes(P, E)
    unit, item = unit_rows(jnp.bfloat16), 2
    x, y, w = P * D * item, P * F * item, E * D * F * item
    used = int((sizes > 0).sum()) * D * F * item

    def work(products: int, width: int, again: int, once: int, split: bool) -> Work:
        """`again`: bytes of the rows that each block of columns of `width` reads."""
        rows, _, _, blocks = cut(P, jnp.bfloat16, width, tiles)
        _, _, low, high = (np.asarray(n) for n in schedule(jnp.asarray(sizes), P, rows, empty=not split))
        counts = np.asarray(computed_rows(low, high, unit))
        passes = pieces(counts, rows, unit, tiles.piece if split else tiles.depth, split=split)
        return Work(
            products * flops(P, D, F)[0],
            once,
            once + (blocks - 1) * again,
            int(counts.sum()),
            tuple(n * blocks for n in passes),
        )

    return {
        "grouped_forward": work(1, F, x, x + used + y, True),
        "grouped_dx": work(1, D, y, y + used + x, True),
        "grouped_dw": work(1, F, x, x + y + w, False),
        "gated_forward": work(2, F, x, x + 2 * used + 3 * y, True),  # saves both products for the backward pass
        "gated_dx": work(2, D, 3 * y, 3 * y + 2 * used + x, True),
        "gated_dw": work(2, F, x, x + 3 * y + 2 * w, False),
    }
