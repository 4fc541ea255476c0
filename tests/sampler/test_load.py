"""Many streams at once with all that can go wrong in between, against the real server in its own process.

NORTH_LOAD sets how many run at the same time: 100 by default. With 1,000 it takes a few minutes on two cores:

    NORTH_LOAD=1000 python -m pytest tests/sampler/test_load.py -s
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import time

import aiohttp
import numpy as np
import pytest
from flax import nnx

from north_jax.model import Decoder
from north_jax.sampler.process import SamplerProcess
from north_jax.weights import hf

LOAD = int(os.environ.get("NORTH_LOAD", "100"))
SLOTS, CONTEXT = 64, 256
KINDS = {"native": 40, "chat": 20, "abort": 10, "leave": 14, "long": 4, "invalid": 4, "malformed": 4, "retry": 4}
# What a round may leave behind: the allocator's slack, which does not grow from round to round.
LEAK_BYTES = 48 << 20


@pytest.fixture(scope="module")
def server(untrained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    other = Decoder(hf.load(untrained).config, rngs=nnx.Rngs(1))
    hf.save(folder / "other", other, version="other", step=1, tokenizer_dir=untrained)
    with SamplerProcess(untrained, folder, slots=SLOTS, context=CONTEXT) as process:
        yield process, (untrained, folder / "other")
        assert "Traceback" not in process.log.read_text()


def memory(pid: int) -> int:
    """Resident bytes of the process that are its own, not a file's."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) << 10


class Round:
    """One round of LOAD requests, all started together, with a weight swap every second while they run."""

    def __init__(self, url: str, folders, seed: int):
        self.url, self.folders, self.rng = url, folders, random.Random(seed)
        self.live = 0  # the newest version that may have spoken: versions are numbers that only grow
        self.first_token: list[float] = []
        self.done: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.seen: set[int] = set()
        self.swaps = self.joined = 0

    async def run(self, versions) -> None:
        kinds = self.rng.choices(list(KINDS), KINDS.values(), k=LOAD)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as self.session:
            over, began = asyncio.Event(), time.monotonic()
            swapping = asyncio.ensure_future(self.swap(versions, over))
            try:
                async with asyncio.timeout(240):
                    await asyncio.gather(*(self.one(number, kind) for number, kind in enumerate(kinds)))
                self.seconds = time.monotonic() - began
            finally:
                over.set()
                await swapping

    async def swap(self, versions, over: asyncio.Event) -> None:
        while not over.is_set():
            version = next(versions)
            self.live = version  # from now on an answer may name it
            body = {"model_path": str(self.folders[version % 2]), "weight_version": str(version)}
            body["flush_cache"] = self.rng.random() < 0.5
            async with self.session.post("/update_weights_from_disk", json=body) as answer:
                assert answer.status == 200, await answer.text()
            self.swaps += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 1.0)

    async def one(self, number: int, kind: str) -> None:
        rng = random.Random(f"{number} {self.rng.random()}")
        prompt = [rng.randrange(5, 290) for _ in range(rng.randrange(1, 40))]
        rid, params = f"{id(self)}-{number}", {"max_new_tokens": rng.randrange(8, 200), "ignore_eos": True}
        body = {"input_ids": prompt, "rid": rid, "stream": True, "return_logprob": True, "sampling_params": params}
        if kind in ("long", "invalid", "malformed"):
            body["input_ids"] = [5] * CONTEXT if kind == "long" else [5, 10**6]
            data = b'{"input_ids": [5' if kind == "malformed" else json.dumps(body).encode()
            async with self.session.post("/generate", data=data) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["message"]
        elif kind == "chat":
            await self.chat()
        elif kind == "retry":  # the same request twice at once: one completion
            first, second = await asyncio.gather(self.stream(body, rng), self.stream(body, rng))
            if first["meta_info"]["e2e_latency"] == second["meta_info"]["e2e_latency"]:
                assert first == second
                self.joined += 1  # else the first had ended before the second came
        elif kind == "abort":
            streaming = asyncio.ensure_future(self.stream(body, rng))
            await asyncio.sleep(rng.random() * 2)
            async with self.session.post("/abort_request", json={"rid": rid}) as answer:
                assert answer.status == 200
            await streaming
        else:
            await self.stream(body, rng, leave=rng.randrange(4) if kind == "leave" else None)
        self.done[kind] += 1

    async def stream(self, body: dict, rng: random.Random, leave: int | None = None) -> dict | None:
        """The last event of a native stream, or None where the client goes away after `leave` of them."""
        began, oldest, before = time.monotonic(), self.live, []
        async with self.session.post("/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if leave == 0:
                return None
            for count in itertools.count(1):
                line = (await answer.content.readuntil(b"\n\n")).decode().removeprefix("data: ").strip()
                if line == "[DONE]":
                    break
                event = json.loads(line)
                assert event["output_ids"][: len(before)] == before
                if event["output_ids"] and not before:
                    self.first_token.append(time.monotonic() - began)
                before = event["output_ids"]
                if count == leave:
                    return None
        meta = event["meta_info"]
        assert meta["finish_reason"]["type"] in ("length", "abort")
        if meta["finish_reason"]["type"] == "length":
            assert len(before) == body["sampling_params"]["max_new_tokens"]
        assert [triple[1] for triple in meta["output_token_logprobs"]] == before
        assert all(triple[0] is not None and triple[0] <= 1e-3 for triple in meta["output_token_logprobs"])
        self.spans(meta, len(before), oldest)
        return event

    async def chat(self) -> None:
        oldest = self.live
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "return_meta_info": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.session.post("/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        *lines, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert last == "[DONE]"
        events = [json.loads(line) for line in lines]
        (meta,) = [c["meta_info"] for e in events for c in e["choices"] if "meta_info" in c]
        self.spans(meta, events[-1]["usage"]["completion_tokens"], oldest)

    def spans(self, meta: dict, count: int, oldest: int) -> None:
        """The versions cover all tokens, in the order they went live, none older than when the request was sent."""
        edges = [0] + [span["end"] for span in meta["weight_versions"]]
        assert [span["start"] for span in meta["weight_versions"]] == edges[:-1] and edges[-1] == count
        versions = [int(span["version"]) for span in meta["weight_versions"]]
        assert versions == sorted(set(versions))
        # While a swap is under way the one before it still speaks.
        assert all(max(0, oldest - 1) <= version <= self.live for version in versions), (versions, oldest, self.live)
        self.seen.update(versions)


def test_many_streams(server, capsys):
    process, folders = server

    async def info() -> dict:
        async with aiohttp.ClientSession(process.url) as session, session.get("/server_info") as answer:
            return await answer.json()

    async def settled() -> dict:
        """What the server holds once the last clients that left have been noticed."""
        end = time.monotonic() + 20
        while (now := await info())["open_requests"] or now["running"] or now["queue_length"]:
            assert time.monotonic() < end, now
            await asyncio.sleep(0.05)
        return now

    async def play() -> tuple[list[Round], dict, dict, list[int]]:
        versions, held, rounds = itertools.count(0), [], []
        body = {"model_path": str(folders[0]), "weight_version": "0"}
        async with (
            aiohttp.ClientSession(process.url) as session,
            session.post("/update_weights_from_disk", json=body) as answer,
        ):
            assert answer.status == 200
        before = await info()
        next(versions)
        for seed in range(3):  # the first fills caches and pools that stay
            rounds.append(Round(process.url, folders, seed))
            rounds[-1].live = int((await info())["weight_version"])
            await rounds[-1].run(versions)
            await settled()
            held.append(memory(process.pid))
        async with aiohttp.ClientSession(process.url) as session, session.get("/flush_cache") as answer:
            assert answer.status == 200
        return rounds, before, await info(), held

    rounds, before, after, held = asyncio.run(play())
    assert process.alive and process.starts == 1
    assert all(sum(each.done.values()) == LOAD for each in rounds)
    assert len(set().union(*(each.seen for each in rounds))) > 2 and sum(each.joined for each in rounds)
    assert after["compilations"] == before["compilations"]
    assert {k: v for k, v in after.items() if "page" in k} == {k: v for k, v in before.items() if "page" in k}
    assert held[2] - held[1] < LEAK_BYTES, held
    with capsys.disabled():
        for each, memory_held in zip(rounds, held, strict=True):
            p50, p99 = np.percentile(each.first_token, (50, 99))
            print(
                f"\n{LOAD} requests at once ({each.done}) in {each.seconds:.1f} s, {each.swaps} weight swaps,"
                f" {len(each.seen)} versions seen; time to first token p50 {p50:.2f} s, p99 {p99:.2f} s;"
                f" the server then holds {memory_held >> 20} MiB"
            )
