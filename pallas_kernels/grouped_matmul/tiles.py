"""How the TPU kernels of the grouped products cut their arrays, by dtype and by chip."""

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.schedule import unit_rows


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of a tile (a multiple of 16), the most columns of a block (all, or a multiple of 128), rows of a product.

    `piece` rows by a matrix, `depth` rows by rows; both 16 times a power of two. blocks: the least number of blocks of
    columns, which the cores of a device share.
    """

    rows: int
    columns: int
    piece: int
    depth: int
    blocks: int = 1


# In bfloat16 North's whole matrices fit, so rows and matrices are read once. In float32 a part of them does.
# These are for a chip that is not named; `tuned` has those of each.
# A product of rows by rows takes nearly as many bundles for 16 rows as for the 256 of a v6e's or TPU7x's matrix unit.
# So the rest of a visit is one product, of the units it has and no more: a program for every such number.
TILES = {
    jnp.dtype(jnp.bfloat16): Tiles(rows=512, columns=2048, piece=128, depth=256),
    jnp.dtype(jnp.float32): Tiles(rows=256, columns=512, piece=128, depth=128),
}
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
TUNED = pathlib.Path(__file__).parent / "tuned"


@functools.cache
def tuned(chip: str) -> Tiles:
    """The tiles for bfloat16 that `python tools/kernels.py grouped_matmul --rank` chose for one of CHIPS."""
    return Tiles(**json.loads((TUNED / f"{chip}.json").read_text())["tiles"])


def cut(P: int, dtype: jnp.dtype, width: int, tiles: Tiles) -> tuple[int, int, int, int]:
    """Rows of a tile, rows of a unit, and columns and number of the blocks that share `width` evenly."""
    unit = unit_rows(dtype)
    blocks = max(pl.cdiv(width, tiles.columns), min(tiles.blocks, pl.cdiv(width, 128)))
    columns = width if blocks == 1 else pl.cdiv(width, blocks * 128) * 128
    return min(tiles.rows, pl.cdiv(P, unit) * unit), unit, columns, pl.cdiv(width, columns)
