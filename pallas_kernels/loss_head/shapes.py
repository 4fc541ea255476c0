"""Named shapes shared by test, bench and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """N tokens of width D over a vocabulary of V."""

    N: int
    D: int
    V: int


# North Mini Code: a device's tokens of a step, from one short row to a whole row of the longest stage.
NORTH = {f"tokens_{N // 1024}k": Shape(N, 2048, 262144) for N in (8192, 32768, 131072)}
