"""The client against real servers of both kinds, and its distrust of their answers."""

import asyncio
import contextlib
import copy
import json
import re
import time

import numpy as np
import pytest

from north_jax.sampler.answer import Busy, read_generation
from north_jax.sampler.client import Increment, SamplerClient, SamplerError, SamplerUnavailable

VOCAB, CONTEXT, EOS = 97, 120, 3
GREEDY = {"temperature": 0.0, "max_new_tokens": 100}


def client_of(url, **changes):
    return SamplerClient(url, **{"vocab_size": VOCAB, "context": CONTEXT, "timeout_s": 60.0} | changes)


@pytest.fixture
def url(servers):
    return servers[0].url


@pytest.fixture(scope="module")
def long_prompt(pair):
    """A prompt whose greedy completion is long: the stop token is a matter of the weights."""

    async def find():
        async with client_of(pair[0].url) as client:
            for start in range(4, VOCAB):
                if len((await client.generate([start, 5], **GREEDY)).ids) == 100:
                    return [start, 5]
        raise AssertionError("no prompt has a long greedy completion")

    return asyncio.run(find())


def test_a_stream_adds_up_to_its_generation(url, long_prompt):
    async def run():
        async with client_of(url) as client:
            for _ in range(50):  # what arrives together is one increment, and the tiny model is quick
                *increments, whole = [item async for item in client.stream(long_prompt, **GREEDY)]
                if len(increments) > 1:
                    break
            return increments, whole, await client.generate(long_prompt, **GREEDY)

    increments, whole, again = asyncio.run(run())
    assert len(increments) > 1
    assert all(isinstance(item, Increment) and item.ids for item in increments)
    assert [i for item in increments for i in item.ids] == whole.ids == again.ids
    assert [p for item in increments for p in item.logprobs] == whole.logprobs
    np.testing.assert_allclose(whole.logprobs, again.logprobs, atol=1e-5)
    assert whole.versions == again.versions == [(0, 100, "v0")]
    for item in increments:  # SGLang tells the versions with the last increment only
        assert item.versions in ([], [(0, len(item.ids), "v0")])


def test_a_stream_left_early_ends_on_the_server(url, long_prompt):
    async def run():
        async with client_of(url) as client:
            async with contextlib.aclosing(client.stream(long_prompt, rid="left", **GREEDY)) as stream:
                async for _ in stream:
                    break
            deadline = time.monotonic() + 3  # SGLang alone takes 4 s to notice that nobody listens
            while True:  # the id is free again once the request has ended
                try:
                    body = client.body(long_prompt, temperature=0.0, max_new_tokens=2)
                    return await client._once(body, "left")
                except (Busy, SamplerError):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)

    assert len(asyncio.run(run()).ids) == 2


def test_abort_keeps_the_tokens_drawn(url, long_prompt):
    async def run():
        async with client_of(url) as client:
            whole = await client.generate(long_prompt, **GREEDY)
            for wait_ms in range(5, 1000, 5):  # until it is met in the middle
                request = asyncio.create_task(client.generate(long_prompt, rid="cut", **GREEDY))
                await asyncio.sleep(wait_ms / 1000)
                await client.pause("in_place")
                await client.abort("cut")
                await client.resume()
                cut = await request
                if 0 < len(cut.ids) < 100:
                    return whole, cut
            raise AssertionError("it was never met in the middle")

    whole, cut = asyncio.run(run())
    assert cut.finish_reason == "abort"
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.logprobs) == len(cut.ids)
    assert cut.versions == [(0, len(cut.ids), "v0")]


class Cutting:
    """A proxy in front of a server that cuts the first `cuts` requests once `let_through` bytes were answered."""

    def __init__(self, url, cuts, let_through=0):
        self.target, self.cuts, self.let_through, self.requests = url.rsplit(":", 1)[1], cuts, let_through, []

    async def __aenter__(self):
        self._tasks = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(self.target))
        request = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", request.lower()).group(1))
        request += await reader.readexactly(length)
        self.requests.append(request)
        cut = b"/generate" in request and self.cuts > 0
        self.cuts -= cut
        far_writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answered = 0
        try:
            while data := await far_reader.read(65536):
                answered += len(data)
                if cut and answered > self.let_through:
                    writer.write(data[: len(data) - (answered - self.let_through)])
                    break
                writer.write(data)
            await writer.drain()
        finally:
            writer.close()
            far_writer.close()


def rids(proxy):
    return [json.loads(r.split(b"\r\n\r\n", 1)[1])["rid"] for r in proxy.requests if b"POST /generate" in r]


def test_a_lost_connection_is_tried_again_under_a_new_id(url, long_prompt):
    async def run():
        async with client_of(url) as client:
            expected = await client.generate(long_prompt, **GREEDY)
        async with Cutting(url, cuts=2) as proxy:
            async with client_of(proxy.url) as client:
                result = await client.generate(long_prompt, rid="r", **GREEDY)
            await asyncio.sleep(0.1)
            return expected, result, rids(proxy)

    expected, result, sent = asyncio.run(run())
    assert result.ids == expected.ids
    assert sent == ["r", "r.1", "r.2"]


def test_a_stream_lost_after_its_first_tokens_is_not_tried_again(url, long_prompt):
    async def run():
        async with Cutting(url, cuts=1, let_through=1500) as proxy, client_of(proxy.url) as client:
            had = []
            with pytest.raises(SamplerUnavailable, match="stream broke after its first tokens"):
                async for item in client.stream(long_prompt, **GREEDY):
                    had.append(item)
            assert had

    asyncio.run(run())


def test_an_id_still_in_use_gives_both_callers_a_completion(url, long_prompt):
    async def run():
        async with client_of(url) as client, client_of(url) as other:
            return await asyncio.gather(*(c.generate(long_prompt, rid="same", **GREEDY) for c in (client, other)))

    first, second = asyncio.run(run())
    assert first.ids == second.ids
    assert len(first.ids) == 100


def test_truncated_sampling_of_one_candidate_is_greedy(url, long_prompt):
    async def run():
        async with client_of(url) as client:
            greedy = await client.generate(long_prompt, temperature=0.0, max_new_tokens=20)
            top_k = await client.generate(long_prompt, temperature=1.0, max_new_tokens=20, top_k=1)
            min_p = await client.generate(long_prompt, temperature=1.0, max_new_tokens=20, min_p=1.0)
            return greedy, top_k, min_p

    greedy, top_k, min_p = asyncio.run(run())
    assert greedy.ids == top_k.ids == min_p.ids


def test_routed_experts(servers, long_prompt, tiny_config):
    shape = tiny_config.num_hidden_layers, tiny_config.num_experts_per_tok

    async def run():
        async with client_of(servers[0].url, experts=shape) as client:
            return await client.generate(long_prompt, temperature=0.0, max_new_tokens=10)

    async def ask_for_a_wrong_shape():
        async with client_of(servers[0].url, experts=(3, 5)) as client:
            await client.generate(long_prompt, temperature=0.0, max_new_tokens=10)

    result = asyncio.run(run())
    with pytest.raises(SamplerError, match=r"are \d+ numbers, not 11 tokens x 3 layers x 5 experts"):
        asyncio.run(ask_for_a_wrong_shape())
    assert result.experts.shape == (2 + 10 - 1, *shape)
    assert not result.experts[:, 0].any()  # the dense first layer
    chosen = result.experts[:, 1:]
    assert chosen.min() >= 0
    assert chosen.max() < tiny_config.num_experts
    assert (chosen[..., 0] != chosen[..., 1]).all()


def test_weights_that_changed_under_an_unflushed_cache_are_told(servers, versions, long_prompt):
    if servers[0].kind != "sglang":
        pytest.skip("the embedded server recomputes frozen requests, so that it can always flush")

    async def run():
        async with client_of(servers[0].url) as client:
            request = asyncio.create_task(client.generate(long_prompt, **GREEDY))
            await asyncio.sleep(0.1)
            await client.pause("in_place")
            with pytest.raises(SamplerError, match="cache still holds the old ones' keys and values"):
                await client.update_weights(versions / "v1", "v1")
            await client.resume()
            return await request

    result = asyncio.run(run())
    assert [version for *_, version in result.versions] in (["v0", "v1"], ["v0"], ["v1"])


def test_what_must_not_be_sent_is_refused():
    client = client_of("http://127.0.0.1:9")
    for how, sentence in (
        ({"ids": [VOCAB]}, r"prompt has ids from 97 to 97; the vocabulary has 97"),
        ({"ids": [-1]}, "prompt has ids from -1"),
        ({"ids": []}, "does not fit"),
        ({"ids": [5] * CONTEXT}, "does not fit the context of 120"),
        ({"stop_ids": [EOS, VOCAB]}, "stop list has ids from 3 to 97"),
        ({"max_new_tokens": 0}, "ask for 1 or more"),
    ):
        with pytest.raises(ValueError, match=sentence):
            client.body(**{"ids": [5], "temperature": 1.0, "max_new_tokens": 4} | how)
    assert client.body([5] * 100, temperature=1, max_new_tokens=50)["sampling_params"]["max_new_tokens"] == 20


@pytest.fixture
def answer(url, long_prompt):
    """A real answer of 10 tokens, as it came."""

    async def run():
        async with client_of(url) as client:
            body = client.body(long_prompt, temperature=0.0, max_new_tokens=10)
            return await client._send("POST", "/generate", body)

    return asyncio.run(run())


def change(path, value):
    def apply(answer):
        *where, last = path
        for key in where:
            answer = answer[key]
        answer[last] = value

    return apply


META = "meta_info"
SPAN = {"version": "v0", "start": 0, "end": 10}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (change((META, "output_token_logprobs", 4, 0), None), "log-probability None of output token 4"),
        (change((META, "output_token_logprobs", 0, 0), float("nan")), "log-probability nan of output token 0"),
        (change((META, "output_token_logprobs", 0, 0), 0.5), "log-probability 0.5"),
        (change((META, "output_token_logprobs", 2, 1), 96), "10 ids and the 10 of its log-probabilities differ"),
        (lambda a: a[META]["output_token_logprobs"].pop(), "10 ids and the 9"),
        (lambda a: (a["output_ids"].pop(), a[META]["output_token_logprobs"].pop()), "do not cover the 9"),
        (change((META, "completion_tokens"), 11), "claims 11 tokens and sent 10"),
        (change((META, "prompt_tokens"), 3), "counted 3 prompt tokens where 2"),
        (change((META, "cached_tokens"), 3), "says that 3 of 2"),
        (change((META, "weight_versions"), [SPAN | {"end": 9}]), "do not cover"),
        (change((META, "weight_versions"), [SPAN | {"start": 1}]), "do not cover"),
        (change((META, "weight_versions"), [SPAN | {"end": 4}, SPAN | {"start": 5}]), "do not cover"),
        (change((META, "weight_versions"), [SPAN | {"end": 12}, SPAN | {"start": 12}]), "do not cover"),
        (lambda a: a[META].pop("weight_versions"), "lacks a field: KeyError"),
        (lambda a: a[META].pop("output_token_logprobs"), "lacks a field: KeyError"),
        (lambda a: a[META].pop("finish_reason"), "lacks a field: KeyError"),
        (change((META, "finish_reason"), {"type": "tired"}), "finish reason 'tired'"),
        (change((META, "finish_reason"), {"type": "stop", "matched": 96}), "stopped at token 96"),
        (change((META, "finish_reason"), {"type": "abort", "status_code": 400, "message": "no"}), "status 400: no"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_refused(answer, spoil, sentence):
    good = read_generation(copy.deepcopy(answer), prompt_tokens=2, max_new_tokens=10)
    assert len(good.ids) == 10
    spoilt = copy.deepcopy(answer)
    spoil(spoilt)
    with pytest.raises(SamplerError, match=sentence):
        read_generation(spoilt, prompt_tokens=2, max_new_tokens=10)


def test_a_short_answer_is_refused(answer):
    for asked in (9, 11):
        with pytest.raises(SamplerError, match=f"ended by 'length' after 10 tokens where {asked} were asked for"):
            read_generation(answer, prompt_tokens=2, max_new_tokens=asked)


def test_a_busy_server_is_not_a_refusal(answer):
    busy = copy.deepcopy(answer)
    busy[META]["finish_reason"] = {"type": "abort", "status_code": 503, "message": "queue full"}
    with pytest.raises(Busy, match="503: queue full"):
        read_generation(busy, prompt_tokens=2, max_new_tokens=10)


def test_an_abort_while_waiting_has_no_tokens_and_is_no_error():
    waiting = {"output_ids": [], META: {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    result = read_generation(waiting, prompt_tokens=4, max_new_tokens=9)
    assert (result.ids, result.versions, result.finish_reason, result.prompt_tokens) == ([], [], "abort", 4)
