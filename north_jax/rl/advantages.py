"""Advantages of the rollouts of a group."""

import numpy as np


def rloo(reward_N, valid_N, group_N) -> np.ndarray:
    """Leave-one-out advantage A_i = r_i - mean of the other valid rewards of its group = n/(n-1) * (r_i - mean).

    reward_N, valid_N (0/1), group_N (labels): one entry per rollout. Returns float64 advantage_N. n counts the valid
    members only: an invalid member (its environment failed) is in no baseline and gets 0, and so does the only valid
    member of a group. A group whose valid rewards are all equal gets exactly 0.
    Source: Ahmadian et al., arXiv 2402.14740.
    """
    reward_N = np.asarray(reward_N, np.float64)
    valid_N = np.asarray(valid_N, bool)
    group_N = np.asarray(group_N)
    advantage_N = np.zeros_like(reward_N)
    for label in np.unique(group_N):
        member_N = valid_N & (group_N == label)
        reward_M = reward_N[member_N]
        # Compared, not computed: rounding would leave equal rewards such as 0.1 with advantages of 1e-17.
        if len(reward_M) < 2 or reward_M.min() == reward_M.max():
            continue
        advantage_N[member_N] = reward_M - (reward_M.sum() - reward_M) / (len(reward_M) - 1)
    return advantage_N
