"""Named shapes shared by test, bench and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """B rows of S queries over tables of W pages of P tokens each; `window`: what sliding layers see (None: all)."""

    B: int
    S: int
    W: int
    H: int = 32
    G: int = 4
    K: int = 128
    P: int = 16
    window: int | None = None


# North Mini Code in the sampler: 64 rows of up to 32,768 tokens or one of 131,072, windows of 4,096, eight tokens a
# call; and a prefill of eight rows.
NORTH = {
    "decode_full_32k": Shape(B=64, S=1, W=2048),
    "decode_full_128k": Shape(B=1, S=1, W=8192),
    "decode_window": Shape(B=64, S=1, W=258, window=4096),
    "prefill_window": Shape(B=8, S=128, W=265, window=4096),
}
