"""The packed batch of a learner step gives the loss of the unpacked rollouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.agents.record import Rollout, version_S
from north_jax.rl import loss
from north_jax.rl.batch import make_batch
from north_jax.rl.groups import Group


def make_groups(seed=0, longest=60):
    """Three groups of four: mixed with a lost member and one that never acts, all equal, all but one lost."""
    rng = np.random.default_rng(seed)
    rewards = [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    groups = []
    for id, row in enumerate(rewards):
        members = []
        for index, reward in enumerate(row):
            length = int(rng.integers(5, longest))
            action = rng.random(length) < 0.6
            action[0], action[-1] = False, False  # ends with an observation nothing acts on
            lost = (id, index) == (2, 3) or (id == 3 and index > 0)
            if (id, index) == (0, 2):
                action[:] = False
            members.append(
                Rollout(
                    task=f"task {id}",
                    family="terminal",
                    template="count",
                    harness="bash",
                    seed=index,
                    ids=rng.integers(1, 100, length).tolist(),
                    mask=action.astype(int).tolist(),
                    logprobs=(np.log(rng.random(length)) * action).tolist(),
                    versions=[(0, 3, "4"), (3, length, "8")],
                    status="environment_failure" if lost else "solved" if reward else "wrong",
                    detail="",
                    turns=1,
                    seconds=0.1,
                )
            )
        groups.append(Group(10 + id, f"task {id}", tuple(members)))
    return groups


def packed_loss(batch):
    arrays = {name: jnp.asarray(array) for name, array in batch.arrays().items()}
    # A stand-in for the learner's log-probabilities that depends on token and position.
    logp_BS = -0.01 * arrays["ids_BS"] - 0.02 * arrays["positions_BS"]
    return loss.cispo(
        logp_BS,
        arrays["logp_BS"],
        arrays["advantage_BS"],
        arrays["action_BS"],
        ratio_cap=5.0,
        denominator=arrays["denominator_BS"],
    )


def plain_loss(groups, zero_variance, aggregation, length):
    """The same sum in plain loops over rollouts and tokens."""
    counted = [
        (group.id, member)
        for group in groups
        for member in group.members
        if member.valid and (zero_variance == "keep" or group.advantages().any())
    ]
    tokens = [sum(member.mask) for _, member in counted]
    total = 0.0
    for group in groups:
        for member, advantage in zip(group.members, group.advantages(), strict=True):
            own = sum(member.mask)
            if not advantage or not own:
                continue
            if aggregation == "token_mean":
                denominator = sum(tokens)
            elif aggregation == "prompt_mean":
                prompts = {id for id, counted_member in counted if any(counted_member.mask)}
                denominator = len(prompts) * sum(
                    t for (id, _), t in zip(counted, tokens, strict=True) if id == group.id
                )
            else:
                denominator = own * sum(t > 0 for t in tokens)
            for s in np.flatnonzero(member.mask):
                logp = -0.01 * member.ids[s] - 0.02 * s
                weight = min(np.exp(logp - member.logprobs[s]), 5.0)
                total -= weight * advantage * logp / denominator
    return total


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "seq_mean_nonempty_rows"])
@pytest.mark.parametrize("length", [60, 200])
def test_packing_does_not_change_the_loss(zero_variance, aggregation, length):
    groups = make_groups()
    batch = make_batch(groups, length, zero_variance=zero_variance, aggregation=aggregation)
    value, metrics = packed_loss(batch)
    assert float(value) == pytest.approx(plain_loss(groups, zero_variance, aggregation, length), rel=1e-5)
    trained = [m for g in groups for m, a in zip(g.members, g.advantages(), strict=True) if a and any(m.mask)]
    assert int(metrics["tokens"]) == sum(sum(member.mask) for member in trained)


def test_rows():
    groups = make_groups()
    batch = make_batch(groups, 64)
    assert batch.ids_BS.shape == (8, 64)
    # In group 10 one member never acts; in group 12 one is lost; groups 11 and 13 have no signal.
    expected = {(10, 0), (10, 1), (10, 3), (12, 0), (12, 1), (12, 2)}
    assert {(place.group, place.member) for place in batch.places} == expected
    covered = np.zeros(batch.ids_BS.shape, int)
    for place in batch.places:
        member = groups[place.group - 10].members[place.member]
        where = np.s_[place.row, place.start : place.end]
        tokens = place.end - place.start
        covered[where] += 1
        assert batch.action_BS[where][-1] and not any(member.mask[tokens:])
        np.testing.assert_array_equal(batch.ids_BS[where], member.ids[:tokens])
        np.testing.assert_array_equal(batch.logp_BS[where], np.float32(member.logprobs[:tokens]))
        np.testing.assert_array_equal(batch.version_BS[where], version_S(member)[:tokens])
        np.testing.assert_array_equal(batch.positions_BS[where], np.arange(tokens))
        assert len(np.unique(batch.segment_ids_BS[where])) == 1
    np.testing.assert_array_equal(covered, batch.segment_ids_BS > 0)
    for row in range(8):
        segments = batch.segment_ids_BS[row][batch.segment_ids_BS[row] > 0]
        assert np.unique(segments).tolist() == list(range(1, len(np.unique(segments)) + 1))
    valid = [member for group in groups for member in group.members if member.valid]
    assert batch.tokens == sum(sum(member.mask) for member in valid)
    assert batch.fill == pytest.approx(covered.mean())


def test_few_shapes():
    shapes = {make_batch(make_groups(seed) * copies, 60).ids_BS.shape for seed in range(4) for copies in (1, 2, 3)}
    assert shapes <= {(8, 60), (16, 60), (24, 60)}
    assert make_batch(make_groups(), 60, row_multiple=3).ids_BS.shape[0] % 3 == 0


@pytest.mark.parametrize("groups", [[], make_groups()[1:2]], ids=["no group", "no variance"])
def test_nothing_to_learn_from_is_a_batch_of_padding(groups):
    batch = make_batch(groups, 60)
    value, metrics = packed_loss(batch)
    assert batch.ids_BS.shape == (8, 60)
    assert (float(value), int(metrics["tokens"]), batch.places) == (0.0, 0, ())


def test_what_cannot_be_packed_is_refused_by_name():
    message = r"member 0 of group 10 \(task 'task 0'\) has \d+ tokens, but a learner row holds 3"
    with pytest.raises(ValueError, match=message):
        make_batch(make_groups(), 3)
    with pytest.raises(ValueError, match="zero_variance 'yes' is unknown: use one of keep, drop"):
        make_batch([], 3, zero_variance="yes")
