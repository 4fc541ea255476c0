"""What the turn costs, by count and without running it."""

from pallas_kernels.attention.work import BF16, Work
from pallas_kernels.rotary.shapes import Shape


def kernels(shape: Shape, platform: str, tiles=None) -> dict[str, Work]:
    """The work of the kernel on a named shape in bfloat16. {} on a GPU, where XLA does it.

    6 FLOPs a pair of dimensions; x, cos and sin are read once and the result written once.
    """
    if platform != "tpu":
        return {}
    size, angles = shape.S * shape.H * shape.K, shape.S * shape.K
    moved = 2 * (size + angles) * BF16
    return {"rotary": Work(3 * size, moved, moved)}
