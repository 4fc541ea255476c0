"""Named shapes shared by test, bench and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """S tokens in a row, documents of `document` tokens, and the window that sliding layers see (None: all)."""

    S: int
    H: int
    G: int
    K: int
    window: int | None = None
    document: int | None = None


# North Mini Code: 32 query heads on 4 key/value heads of width 128, windows of 4096 tokens.
NORTH = {
    "full_4k": Shape(4096, 32, 4, 128),
    "full_8k_packed": Shape(8192, 32, 4, 128, document=2048),
    "full_32k": Shape(32768, 32, 4, 128),
    "full_128k": Shape(131072, 32, 4, 128),
    "window_8k_packed": Shape(8192, 32, 4, 128, window=4096, document=2048),
    "window_32k": Shape(32768, 32, 4, 128, window=4096),
    "window_128k": Shape(131072, 32, 4, 128, window=4096),
}
