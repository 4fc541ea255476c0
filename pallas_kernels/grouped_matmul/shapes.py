"""Named shapes shared by test, bench and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """P rows of width D against E matrices [D, F]; P counts (token, chosen expert) pairs."""

    P: int
    D: int
    F: int
    E: int


# North Mini Code: 128 experts of width 768 on a model width of 2048, eight experts per token.
NORTH = {
    "train_8k_up": Shape(P=8192 * 8, D=2048, F=768, E=128),
    "train_8k_down": Shape(P=8192 * 8, D=768, F=2048, E=128),
    "train_4k_up": Shape(P=4096 * 8, D=2048, F=768, E=128),
    "train_32k_up": Shape(P=32768 * 8, D=2048, F=768, E=128),
    "train_128k_up": Shape(P=131072 * 8, D=2048, F=768, E=128),
    "decode_64_up": Shape(P=64 * 8, D=2048, F=768, E=128),
    "decode_64_down": Shape(P=64 * 8, D=768, F=2048, E=128),
}
# The same relations at a size that a test can afford.
TINY = {
    "train_up": Shape(P=96, D=32, F=16, E=8),
    "train_down": Shape(P=96, D=16, F=32, E=8),
    "decode_up": Shape(P=4, D=32, F=16, E=8),
    "one_expert": Shape(P=12, D=8, F=8, E=1),
}
