"""Packed rows that several tests of this folder train on."""

import numpy as np
from test_sharding import TINY


def batch_of(rows, S=64):
    """Packed rows: documents over the edges of chunks, of one token, padding; a row of one document; one of padding."""
    draw = np.random.default_rng(0)
    layouts = [[10, 30, 1, 1, 15], [S], [], [1, 2, 3, 5, 8, 13, 21]]
    segments_BS = np.zeros((rows, S), np.int32)
    positions_BS = np.zeros((rows, S), np.int32)
    for row, (segments_S, positions_S) in enumerate(zip(segments_BS, positions_BS, strict=True)):
        at = 0
        for number, length in enumerate(layouts[row % 4], 1):
            segments_S[at : at + length], positions_S[at : at + length] = number, np.arange(length)
            at += length
    return {
        "ids_BS": draw.integers(1, TINY.vocab_size, (rows, S), np.int32),
        "segment_ids_BS": segments_BS,
        "positions_BS": positions_BS,
        "weights_BS": (draw.random((rows, S)) * (segments_BS > 0)).astype(np.float32),
    }
