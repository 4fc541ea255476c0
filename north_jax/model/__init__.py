"""The decoder's arithmetic and nothing else: no files, no training, no HTTP.

Shapes live in names, one capital letter per axis:

    B batch (rows, or slots of a cache)   S query length       T key length
    D model width                         H query heads        G key/value heads
    R query heads per key/value head      K head width         E experts
    C experts chosen per token            F feed-forward width V vocabulary
    L layers                              N flattened tokens (B * S)
    X pages of a key/value pool           W entries of a page table
    P tokens of a page
"""

from north_jax.model.cache import Cache, Tables, init_cache, own_pages
from north_jax.model.config import ModelConfig
from north_jax.model.decoder import MOE_KINDS, Decoder, parameter_counts

__all__ = ["MOE_KINDS", "Cache", "Decoder", "ModelConfig", "Tables", "init_cache", "own_pages", "parameter_counts"]
