import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from north_jax.sampler.engine import PAGE_SIZE, Engine
from north_jax.sampler.programs import DECODE_STEPS
from north_jax.sampler.sampling import Sampling

SLOTS, CONTEXT, EOS = 8, 128, 3


@pytest.fixture(scope="module")
def shared_engine(model):
    engine = Engine(model, slots=SLOTS, context=CONTEXT, version="v0", eos_ids=(EOS,))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine, model):
    """The warm engine, back at its first weights, with nothing cached and nothing running."""
    shared_engine.resume().result()
    shared_engine.abort(None).result()
    shared_engine.swap(model, "v0").result()
    return shared_engine


@pytest.fixture(scope="module")
def forward():
    """log softmax(logits / temperature) of whole sequences by the trainer's forward pass, padded to one shape."""

    @nnx.jit
    def logits(model, ids_BS):
        return model(ids_BS)

    def run(model, tokens, temperature=1.0):
        ids_BS = np.zeros((1, CONTEXT), np.int32)
        ids_BS[0, : len(tokens)] = tokens
        return np.asarray(jax.nn.log_softmax(logits(model, jnp.asarray(ids_BS))[0, : len(tokens)] / temperature))

    return run


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(4, 97) for _ in range(length)]


def greedy(n):
    return Sampling(max_new_tokens=n, temperature=0.0, ignore_eos=True)


def expected_logprobs(forward, model, ids, out, temperature=1.0):
    logp = forward(model, ids + out, temperature)
    return [logp[len(ids) + i - 1, token] for i, token in enumerate(out)]


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def drawn(engine):
    return engine.stats().result()["generated_tokens"]


def step_by_step(engine, monkeypatch):
    """Make the engine wait for a permit before every decode call, so that a test acts in the middle of a request."""
    import threading

    permits = threading.Semaphore(0)
    decode = engine._decode_some

    def gated(ready):
        while not permits.acquire(timeout=0.005):
            if engine._messages:
                return
        decode(ready)

    monkeypatch.setattr(engine, "_decode_some", gated)
    return permits


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("length", [1, 2, 31, 33, 60])
def test_logprobs_are_those_of_the_trainers_forward(engine, forward, model, length, temperature):
    ids = prompt(length)
    sampling = Sampling(max_new_tokens=50, temperature=temperature, ignore_eos=True, seed=length)
    result = engine.submit("a", ids, sampling).result()
    assert len(result.ids) == len(result.logprobs) == 50
    assert result.finish == ("length", 50)
    assert result.spans == [("v0", 0, 50)]
    want = expected_logprobs(forward, model, ids, result.ids, temperature or 1.0)
    np.testing.assert_allclose(result.logprobs, want, atol=1e-5)


def test_greedy_is_the_models_argmax_continuation(engine, forward, model):
    ids = prompt(20, seed=1)
    result = engine.submit("a", ids, greedy(30)).result()
    logp = forward(model, ids + result.ids)
    assert result.ids == logp[len(ids) - 1 : -1].argmax(axis=-1).tolist()


def test_a_seeded_request_is_the_same_alone_and_among_others(engine, forward, model):
    jobs = [
        (prompt(5 + 7 * i % 60, seed=i), Sampling(10 + i, 1.0, 0.95 if i % 2 else 1.0, ignore_eos=True, seed=100 + i))
        for i in range(3 * SLOTS)
    ]
    together = [f.result() for f in [engine.submit(str(i), *job) for i, job in enumerate(jobs)]]
    for i in (0, 1, 7, 20):
        engine.flush().result()
        alone = engine.submit("alone", *jobs[i]).result()
        assert alone.ids == together[i].ids
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-5)
    for (ids, _), result in zip(jobs, together, strict=True):
        np.testing.assert_allclose(result.logprobs, expected_logprobs(forward, model, ids, result.ids), atol=1e-5)


def test_different_seeds_differ_and_one_seed_repeats(engine):
    ids = prompt(10)
    a, b, c = (engine.submit("a", ids, Sampling(40, seed=s, ignore_eos=True)).result().ids for s in (1, 2, 1))
    assert a == c != b


def test_stop_tokens_are_in_the_output(engine):
    ids = prompt(12, seed=4)
    free = engine.submit("a", ids, greedy(40)).result().ids
    stop = free[10]
    first = free.index(stop)
    stopping = Sampling(max_new_tokens=40, temperature=0.0, stop_token_ids=(stop,))
    result = engine.submit("b", ids, stopping).result()
    assert (result.ids, result.finish) == (free[: first + 1], ("stop", stop))
    assert len(result.logprobs) == first + 1
    ignoring = Sampling(max_new_tokens=40, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    assert engine.submit("c", ids, ignoring).result().ids == free


def test_the_models_own_end_stops(engine):
    results = [engine.submit(str(s), prompt(3), Sampling(120, temperature=5.0, seed=s)) for s in range(20)]
    ended = [r for r in (f.result() for f in results) if r.finish[0] == "stop"]
    assert ended
    assert all(r.finish == ("stop", EOS) and r.ids.index(EOS) == len(r.ids) - 1 for r in ended)


def test_the_context_cuts_the_completion(engine, forward, model):
    ids = prompt(CONTEXT - 9)
    result = engine.submit("a", ids, greedy(50)).result()
    assert result.finish == ("length", 9)
    np.testing.assert_allclose(result.logprobs, expected_logprobs(forward, model, ids, result.ids), atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([], "non-empty"),
        ([1, 97], "token id 97 in input_ids is outside the vocabulary of 97"),
        ([-1], "token id -1"),
        ([1.0], "whole numbers"),
        ([5] * CONTEXT, "128 tokens leaves no room in the context of 128"),
    ],
)
def test_bad_prompts_are_refused_at_once(engine, ids, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.submit("a", ids, greedy(1))


def test_the_next_turn_computes_only_what_is_new(engine, forward, model):
    ids = prompt(40, seed=5)
    first = engine.submit("a", ids, greedy(20)).result()
    second_ids = ids + first.ids + prompt(15, seed=6)
    before = engine.stats().result()["prefill_tokens"]
    second = engine.submit("b", second_ids, greedy(20)).result()
    assert second.cached_tokens == 48  # whole pages of the 59 tokens that were computed
    assert engine.stats().result()["prefill_tokens"] - before == len(second_ids) - 1 - 48
    np.testing.assert_allclose(second.logprobs, expected_logprobs(forward, model, second_ids, second.ids), atol=1e-5)
    engine.flush().result()
    assert engine.submit("c", second_ids, greedy(20)).result().ids == second.ids


def test_a_group_computes_its_prompt_once(engine, forward, model):
    ids = prompt(60, seed=7)
    before = engine.stats().result()["prefill_tokens"]
    group = [engine.submit(str(i), ids, Sampling(20, seed=i, ignore_eos=True)) for i in range(SLOTS)]
    results = [f.result() for f in group]
    assert engine.stats().result()["prefill_tokens"] - before == 59 + (SLOTS - 1) * (59 - 48)
    assert sorted(r.cached_tokens for r in results) == [0] + [48] * (SLOTS - 1)
    for r in results:
        np.testing.assert_allclose(r.logprobs, expected_logprobs(forward, model, ids, r.ids), atol=1e-5)


def test_conversations_keep_their_prefix_beside_each_other(engine):
    """Conversations over one shared prompt each find their own turns again, not one another's."""
    system = prompt(30, seed=8)
    histories = [system + prompt(10, seed=20 + i) for i in range(SLOTS)]
    for _ in range(2):
        results = [f.result() for f in [engine.submit(str(i), h, greedy(8)) for i, h in enumerate(histories)]]
        histories = [h + r.ids + prompt(5, seed=9) for h, r in zip(histories, results, strict=True)]
    results = [f.result() for f in [engine.submit(str(i), h, greedy(8)) for i, h in enumerate(histories)]]
    assert [r.cached_tokens for r in results] == [(len(h) - 6) // PAGE_SIZE * PAGE_SIZE for h in histories]


@pytest.mark.parametrize("few", [True, False])
def test_swap_in_the_middle_recomputes_under_the_new_weights(engine, forward, model, make_model, monkeypatch, few):
    new = make_model(1)
    permits = step_by_step(engine, monkeypatch)
    count = 1 if few else SLOTS
    jobs = [(prompt(10 + i, seed=i), Sampling(30, seed=i, ignore_eos=True)) for i in range(count)]
    before = drawn(engine)
    futures = [engine.submit(str(i), *job) for i, job in enumerate(jobs)]
    permits.release(2)
    wait_for(lambda: drawn(engine) - before == 2 * DECODE_STEPS * count)
    engine.swap(new, "v1").result()
    permits.release(100)
    for (ids, _), result in zip(jobs, (f.result() for f in futures), strict=True):
        assert result.spans == [("v0", 0, 2 * DECODE_STEPS), ("v1", 2 * DECODE_STEPS, 30)]
        assert (result.version, result.retractions) == ("v1", 1)
        old_logprobs = expected_logprobs(forward, model, ids, result.ids)
        new_logprobs = expected_logprobs(forward, new, ids, result.ids)
        np.testing.assert_allclose(
            result.logprobs, old_logprobs[: 2 * DECODE_STEPS] + new_logprobs[2 * DECODE_STEPS :], atol=1e-5
        )
        assert (
            np.abs(np.subtract(old_logprobs, new_logprobs))[2 * DECODE_STEPS :].max() > 0.1
        )  # the test can tell them apart


def test_swap_without_flush_keeps_old_keys_and_nobody_else_uses_them(engine, forward, model, make_model, monkeypatch):
    new = make_model(1)
    permits = step_by_step(engine, monkeypatch)
    ids = prompt(40, seed=11)
    engine_prefill = engine.stats().result()["prefill_tokens"]
    future = engine.submit("a", ids, greedy(20))
    permits.release(2)
    wait_for(lambda: engine.stats().result()["prefill_tokens"] - engine_prefill == 39 and permits._value == 0)
    engine.swap(new, "v1", flush_cache=False).result()
    permits.release(100)
    result = future.result()
    assert [version for version, *_ in result.spans] == ["v0", "v1"]
    assert result.retractions == 0
    cut = result.spans[1][1]
    new_logprobs = expected_logprobs(forward, new, ids, result.ids)
    assert np.abs(np.subtract(result.logprobs, new_logprobs))[cut:].max() > 1e-3
    after = engine.submit("b", ids + result.ids, greedy(10)).result()
    assert after.cached_tokens == 0
    np.testing.assert_allclose(after.logprobs, expected_logprobs(forward, new, ids + result.ids, after.ids), atol=1e-5)


def test_swap_refuses_another_configuration(engine, tiny_config, model):
    import dataclasses

    from north_jax.model import Decoder

    other = Decoder(dataclasses.replace(tiny_config, sliding_window=8), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="another model configuration"):
        engine.swap(other, "v9").result()
    assert engine.submit("a", prompt(5), greedy(3)).result().version == "v0"


def test_abort_keeps_what_was_drawn(engine, forward, model, monkeypatch):
    permits = step_by_step(engine, monkeypatch)
    before = drawn(engine)
    ids = prompt(9)
    running = [engine.submit(rid, ids, greedy(100)) for rid in ("keep", "end")]
    permits.release(2)
    wait_for(lambda: drawn(engine) - before == 4 * DECODE_STEPS)
    assert engine.abort("end").result() == 1
    ended = running[1].result()
    assert (ended.finish, len(ended.ids)) == (("abort", "Aborted"), 2 * DECODE_STEPS)
    np.testing.assert_allclose(ended.logprobs, expected_logprobs(forward, model, ids, ended.ids), atol=1e-5)
    permits.release(100)
    assert running[0].result().finish == ("length", 100)
    assert engine.abort("nobody").result() == 0


def test_abort_of_a_request_that_waits(engine):
    engine.pause("in_place").result()
    future = engine.submit("a", prompt(5), greedy(5))
    engine.abort("a").result()
    assert (future.result().ids, future.result().spans) == ([], [])


def test_abort_before_the_prompt_is_computed_blocks_nobody(engine, monkeypatch):
    """A prompt that shares its first page must not wait for it."""
    ids = prompt(60, seed=12)
    monkeypatch.setattr(engine, "_prefill_some", lambda pending: time.sleep(0.005))
    first = engine.submit("a", ids, greedy(5))
    wait_for(lambda: engine.stats().result()["running"] == 1)
    engine.abort("a").result()
    assert first.result().ids == []
    monkeypatch.undo()
    assert len(engine.submit("b", ids, greedy(5)).result(timeout=30).ids) == 5


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_pause_and_resume_change_nothing_in_the_tokens(engine, monkeypatch, mode, retractions):
    ids, sampling = prompt(30, seed=13), Sampling(40, seed=5, ignore_eos=True)
    undisturbed = engine.submit("a", ids, sampling).result()
    engine.flush().result()
    permits = step_by_step(engine, monkeypatch)
    before = drawn(engine)
    future = engine.submit("b", ids, sampling)
    permits.release(2)
    wait_for(lambda: drawn(engine) - before == 2 * DECODE_STEPS)
    engine.pause(mode).result()
    permits.release(100)
    time.sleep(0.05)
    assert drawn(engine) - before == 2 * DECODE_STEPS
    assert not future.done()
    engine.resume().result()
    result = future.result()
    assert result.ids == undisturbed.ids
    np.testing.assert_allclose(result.logprobs, undisturbed.logprobs, atol=1e-5)
    assert result.retractions == retractions


def test_pause_retract_swap_resume(engine, forward, model, make_model, monkeypatch):
    new = make_model(1)
    permits = step_by_step(engine, monkeypatch)
    before, ids = drawn(engine), prompt(30, seed=14)
    future = engine.submit("a", ids, greedy(24))
    permits.release(2)
    wait_for(lambda: drawn(engine) - before == 2 * DECODE_STEPS)
    engine.pause("retract").result()
    assert engine.flush().result() is True
    engine.swap(new, "v1").result()
    engine.resume().result()
    permits.release(100)
    result = future.result()
    assert (result.spans, result.retractions) == ([("v0", 0, 2 * DECODE_STEPS), ("v1", 2 * DECODE_STEPS, 24)], 1)
    want = expected_logprobs(forward, model, ids, result.ids)[: 2 * DECODE_STEPS]
    want += expected_logprobs(forward, new, ids, result.ids)[2 * DECODE_STEPS :]
    np.testing.assert_allclose(result.logprobs, want, atol=1e-5)


def test_pause_abort_ends_all_and_unknown_modes_are_refused(engine, monkeypatch):
    permits = step_by_step(engine, monkeypatch)
    futures = [engine.submit(str(i), prompt(5), greedy(100)) for i in range(2 * SLOTS)]
    permits.release(1)
    engine.pause("abort").result()
    assert {f.result().finish[0] for f in futures} == {"abort"}
    with pytest.raises(ValueError, match="pause mode 'soft' is not known"):
        engine.pause("soft")


def test_flush_waits_for_nobody(engine, monkeypatch):
    permits = step_by_step(engine, monkeypatch)
    future = engine.submit("a", prompt(5), greedy(8))
    wait_for(lambda: engine.stats().result()["running"] == 1)
    assert engine.flush().result() is False
    permits.release(100)
    future.result()
    assert engine.flush().result() is True


def test_nothing_compiles_after_the_warm_up(engine, make_model):
    """Every mix of lengths, row counts, truncations and controls runs in the programs compiled at the start."""
    before = engine.stats().result()["compilations"]
    rng = random.Random(0)
    for wave in (1, 2, 3, SLOTS, 3 * SLOTS):
        futures = []
        for i in range(wave):
            sampling = Sampling(rng.randint(1, 60), rng.choice([0.0, 0.5, 1.0]), rng.choice([1.0, 0.9]), seed=i)
            futures.append(engine.submit(f"{wave}.{i}", prompt(rng.randint(1, 120), seed=i % 5), sampling))
        engine.swap(make_model(wave), f"w{wave}", flush_cache=wave % 2 == 0).result()
        engine.pause("retract").result()
        engine.resume().result()
        for future in futures:
            future.result()
    assert engine.stats().result()["compilations"] == before


def test_a_dead_engine_tells_everybody(model):
    engine = Engine(model, slots=1, context=16, version="v0")
    engine.start()

    def fail():
        raise MemoryError("no room")

    engine._prefill_some = lambda pending: fail()
    with pytest.raises(RuntimeError, match="the sampling engine has stopped: no room"):
        engine.submit("a", [5, 6], greedy(2)).result(timeout=30)
    assert not engine.alive
    with pytest.raises(RuntimeError, match="has stopped"):
        engine.submit("b", [5, 6], greedy(2)).result(timeout=30)
    with pytest.raises(RuntimeError, match="has stopped"):
        engine.join()


def test_stop_ends_open_requests(model):
    engine = Engine(model, slots=1, context=16, version="v0")
    engine.start()
    engine.pause("in_place").result()
    future = engine.submit("a", [5, 6], greedy(2))
    engine.stop()
    assert future.result().finish[0] == "abort"
