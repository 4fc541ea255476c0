"""Rows copied out of their pages give what the pages give, and go back to where they came from."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from test_decoder import TINY

from north_jax.model import Decoder, Tables, init_cache
from north_jax.model.row_cache import copy_back, copy_out

P, W, STEPS = 4, 4, 3
SLIDING = tuple(TINY.is_sliding(i) for i in range(TINY.num_hidden_layers))


def test_rows_step_as_pages_do_and_go_back():
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), init_cache(TINY, 40, P, sliding_pages=30)
    )
    # The third row is idle; the second has lost its first page in sliding layers, the first ends on a page's edge.
    first_B, start_B = np.asarray([0, 1, 0, 1]), np.asarray([5, 11, -1, 12])
    tables = Tables(random.permutation(40)[: 4 * W].reshape(4, W), random.permutation(30)[:12].reshape(4, 3), first_B)
    tables = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), tables)
    paged, rows = cache, copy_out(cache, tables, SLIDING)
    for step in range(STEPS):
        ids_B1 = jnp.asarray(random.integers(0, TINY.vocab_size, (4, 1)), jnp.int32)
        positions_B1 = jnp.asarray(np.where(start_B >= 0, start_B + step, -1)[:, None], jnp.int32)
        a_BSD, paged = model.step(ids_B1, positions_B1, paged, tables)
        b_BSD, rows = model.step(ids_B1, positions_B1, rows, tables)
        np.testing.assert_allclose(a_BSD[start_B >= 0], b_BSD[start_B >= 0], atol=2e-5, rtol=0)
    written_BS = jnp.asarray(np.where(start_B[:, None] >= 0, start_B[:, None] + np.arange(STEPS), -1), jnp.int32)
    back = copy_back(cache, rows, tables, written_BS, SLIDING, TINY.window)
    for ours, theirs, before in zip(*map(jax.tree.leaves, (back, paged, cache)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
        assert np.any(ours != before, axis=(0, 3)).sum() == 3 * STEPS  # these tokens, and no others
