"""Named shapes shared by test, bench and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One row of S tokens with H heads of width K."""

    S: int
    H: int
    K: int = 128


# North Mini Code: 32 query heads and 4 key heads.
NORTH = {
    f"{what}_{S // 1024}k": Shape(S, H)
    for S in (8192, 4096, 32768, 131072)
    for what, H in (("queries", 32), ("keys", 4))
}
