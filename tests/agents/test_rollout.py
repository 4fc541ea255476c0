"""Rollouts against a real server and real sandboxes: how they end, and what they survive."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from north_jax.agents.rollout import Sampling, play_to_the_end
from north_jax.chat.format import ChatFormat
from north_jax.chat.tokenizer import Tokenizer
from north_jax.envs import SandboxPool, SandboxUnavailable, make_sandbox
from north_jax.envs.bubblewrap import BubblewrapSandbox
from north_jax.envs.tasks import make_task
from north_jax.sampler.client import SamplerClient
from north_jax.sampler.process import SamplerProcess

CONTEXT = 320
TASK = make_task("create_file", 0, split="train", seed=0)


@pytest.fixture(scope="module")
def chat(untrained):
    return ChatFormat(Tokenizer.load(untrained))


@pytest.fixture(scope="module")
def sampler(untrained, tmp_path_factory):
    with SamplerProcess(untrained, tmp_path_factory.mktemp("sampler"), slots=2, context=CONTEXT) as process:
        yield process


def play(chat, sampler, pool, sampling):
    async def main():
        client = SamplerClient(sampler.url, vocab_size=chat.tokenizer.vocab_size, context=CONTEXT)
        with ThreadPoolExecutor(1) as threads:
            async with client:
                return await play_to_the_end(
                    TASK, "bash", seed=1, chat=chat, client=client, pool=pool, threads=threads, sampling=sampling
                )

    return asyncio.run(main())


def test_a_turn_cut_by_the_end_of_the_conversation_is_out_of_budget_and_a_runaway_turn_is_invalid(chat, sampler):
    with SandboxPool(make_sandbox, 1) as pool:
        cut = play(chat, sampler, pool, Sampling(0.0, max_new_tokens=CONTEXT, context=CONTEXT))
        runaway = play(chat, sampler, pool, Sampling(0.0, max_new_tokens=8, context=CONTEXT))
    assert len(cut.ids) == CONTEXT and (cut.status, cut.detail) == ("out_of_budget", f"{CONTEXT} tokens used")
    assert sum(runaway.mask) == 8 and runaway.status == "invalid_action"


class Killed(BubblewrapSandbox):
    """As one that is killed while it starts, `failures` times in all."""

    failures = 0

    def start(self):
        if Killed.failures:
            Killed.failures -= 1
            raise SandboxUnavailable("killed while it started")
        return super().start()


def test_a_sandbox_killed_while_it_starts_is_started_again_and_one_that_never_starts_is_said(chat, sampler):
    sampling = Sampling(max_new_tokens=8, context=CONTEXT)
    with SandboxPool(Killed, 1) as pool:
        Killed.failures = 2
        assert play(chat, sampler, pool, sampling).valid and Killed.failures == 0
    with SandboxPool(Killed, 1) as pool:
        Killed.failures = 3
        with pytest.raises(SandboxUnavailable, match="killed while it started"):
            play(chat, sampler, pool, sampling)
