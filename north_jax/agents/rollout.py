"""The rollout loop: harness x sandbox x sampler, token in and token out.

The conversation is a list of token ids that only grows: prompt, sampled completion, observation, completion, ...
Nothing that was sampled is ever decoded and encoded again, so what is trained on is what the sampler saw.
"""

import asyncio
import dataclasses
import time
from concurrent.futures import Executor

from north_jax.agents.episode import Episode
from north_jax.agents.harness import HARNESSES, Harness
from north_jax.agents.record import Rollout
from north_jax.chat.format import ChatFormat, ParseError
from north_jax.envs.pool import SandboxPool
from north_jax.envs.sandbox import Sandbox, SandboxDied, SandboxUnavailable
from north_jax.envs.tasks import Task
from north_jax.sampler.client import Asker


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are drawn. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 96  # per turn
    context: int = 512  # tokens of the whole conversation


async def run_rollout(
    task: Task,
    harness: Harness,
    *,
    chat: ChatFormat,
    client: Asker,
    pool: SandboxPool,
    threads: Executor,
    sampling: Sampling,
    seed: int,
) -> Rollout:
    """Plays one episode. The caller bounds how many run at once by the size of the sandbox pool.

    Raises what the client raises when the sampler cannot be reached; a lost sandbox is the rollout's status instead.
    """
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[tuple[int, int, str]] = []
    turns, status, detail = 0, "", ""

    def show(tokens: list[int]) -> None:
        ids.extend(tokens)
        mask.extend([0] * len(tokens))
        logprobs.extend([0.0] * len(tokens))

    sandbox = await _acquire(pool, threads)
    try:
        episode = await loop.run_in_executor(threads, Episode, task, harness, sandbox)
        messages = episode.start()
        show(chat.render(messages, harness.tools, generation_prompt=True).ids)
        while not status:
            room = sampling.context - len(ids)
            if room <= 0:
                status, detail = "out_of_budget", f"{sampling.context} tokens used"
                break
            generation = await client.generate(
                ids,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_new_tokens=min(sampling.max_new_tokens, room),
                stop_ids=chat.stop_ids,
                seed=seed * 1_000 + turns,
            )
            turns += 1
            versions.extend((len(ids) + start, len(ids) + end, version) for start, end, version in generation.versions)
            ids.extend(generation.ids)
            mask.extend([1] * len(generation.ids))
            logprobs.extend(generation.logprobs)
            if generation.finish_reason == "abort":  # by whoever ended the sampler; the policy would have gone on
                status, detail = "environment_failure", "the sampler aborted the request"
                break
            # Cut by the conversation's end, not by the policy: no word on what the turn would have been.
            if generation.finish_reason == "length" and len(ids) >= sampling.context:
                status, detail = "out_of_budget", f"{sampling.context} tokens used"
                break
            try:
                completion = chat.parse(generation.ids)
            except ParseError as error:
                status, detail = "invalid_action", f"{error.code}: {error}"
                break
            result = await loop.run_in_executor(threads, episode.step, completion)
            if result.status is not None:
                status, detail = result.status, result.detail
                break
            messages.append(completion.message())
            show(chat.continuation(messages, [result.message]))
            messages.append(result.message)
    except SandboxDied as error:
        status, detail = "environment_failure", str(error)
    finally:
        pool.release(sandbox)
    return Rollout(
        task=task.id,
        family=task.family,
        template=task.template,
        harness=harness.name,
        seed=seed,
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        status=status,
        detail=detail,
        turns=turns,
        seconds=time.monotonic() - started,
    )


# An episode whose sandbox died is played again, and a sandbox that did not start is started again: this often in all.
_TRIES = 3


async def _acquire(pool: SandboxPool, threads: Executor) -> Sandbox:
    # One that is killed while it starts looks like one that cannot start; only the latter fails every time.
    for attempt in range(_TRIES):
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, pool.acquire)
        except SandboxUnavailable:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


async def play_to_the_end(task: Task, harness: str, *, seed: int, **play) -> Rollout:
    """`run_rollout`, played again with another seed where the environment failed; the last failure is the result."""
    for attempt in range(_TRIES):
        rollout = await run_rollout(task, HARNESSES[harness], seed=seed + attempt, **play)
        if rollout.valid:
            break
    return rollout
