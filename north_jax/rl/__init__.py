"""Asynchronous reinforcement learning: groups of rollouts, the queue they wait in, the journal, and the loss."""

from north_jax.rl.advantages import rloo
from north_jax.rl.batch import Batch, make_batch
from north_jax.rl.groups import Group, GroupFile, read_groups
from north_jax.rl.journal import Journal, RunState, fold
from north_jax.rl.loss import cispo, mismatch_by_lag, mismatch_metrics, version_lag
from north_jax.rl.queue import Taken, WindowedQueue, window_size

__all__ = [
    "Batch",
    "Group",
    "GroupFile",
    "Journal",
    "RunState",
    "Taken",
    "WindowedQueue",
    "cispo",
    "fold",
    "make_batch",
    "mismatch_by_lag",
    "mismatch_metrics",
    "read_groups",
    "rloo",
    "version_lag",
    "window_size",
]
