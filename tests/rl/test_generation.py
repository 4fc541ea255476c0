"""The rollout thread beside the learner: its start, and what it says when nothing can be learned."""

import threading

from north_jax.agents.rollout import Sampling
from north_jax.chat.format import ChatFormat
from north_jax.chat.tokenizer import Tokenizer
from north_jax.envs import SandboxPool, make_sandbox
from north_jax.envs.tasks import make_task, task_from_id
from north_jax.rl.curriculum import Curriculum
from north_jax.rl.generation import Generation
from north_jax.rl.groups import GroupFile
from north_jax.rl.journal import Journal
from north_jax.sampler.process import SamplerProcess

CONTEXT, MEMBERS = 320, 2


def test_weights_can_be_published_at_once_and_groups_without_signal_are_said(untrained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Generation, "SAY_AFTER", 2)
    chat = ChatFormat(Tokenizer.load(untrained))
    sampler = SamplerProcess(untrained, tmp_path, slots=2, context=CONTEXT)
    with (
        SandboxPool(make_sandbox, 2) as pool,
        Journal(tmp_path / "journal.jsonl", step=0, capacity=2, window=1) as journal,
        GroupFile(tmp_path / "rollouts.jsonl") as file,
    ):
        generation = Generation(
            journal=journal,
            file=file,
            curriculum=Curriculum(
                ["create_file"], lambda name, n: make_task(name, n, split="train", seed=0), group_size=MEMBERS, seed=0
            ),
            task_from_id=lambda id: task_from_id(id, seed=0),
            group_size=MEMBERS,
            harnesses=("bash",),
            chat=chat,
            sampler=sampler,
            pool=pool,
            sampling=Sampling(max_new_tokens=8, context=CONTEXT),
            version=0,
            seed=0,
        )
        generation.start()
        interrupted = threading.Event()
        stop = threading.Timer(20.0, interrupted.set)
        try:
            generation.publish(untrained, 1)  # a resumed learner may, before the first rollout
            assert generation.version == 1
            stop.start()
            learner = threading.Thread(target=generation.take, args=(1, interrupted))  # waits for ever: all are wrong
            learner.start()
            while learner.is_alive() and journal.queue.stats(0)["filtered"] < 2:
                learner.join(0.1)
            interrupted.set()
            learner.join()
        finally:
            stop.cancel()
            generation.stop()
            sampler.stop()
    assert "2 groups in a row carried no signal" in capsys.readouterr().out
