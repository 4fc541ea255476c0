"""A pipeline in about a minute: one instruction with two right answers, so that every group's rewards differ.

Half of the demonstrations take each way and each task accepts only one, which SFT cannot tell: there is always a signal
to train on, and nothing that a longer run would learn.
"""

from ml_collections import ConfigDict

from north_jax.envs.tasks import TEMPLATES, Draft, Run, Step, Words, template
from north_jax.rl.learner import rl_config
from north_jax.train.sft import sft_config, stage_config


def _make(which: str):
    def draft(words: Words) -> Draft:
        return Draft(
            instruction="Make a file.",
            files={f"{words()}.txt": words.lines(1)},
            verifier=f"test -e {which}",
            solution=(Step("make it", Run(f"touch {which}")),),
        )

    draft.__name__ = f"make_{which}"
    return draft


for _which in "ab":
    if f"make_{_which}" not in TEMPLATES:
        template("terminal")(_make(_which))


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.job = "pipeline"
    c.seed = 0
    c.model = ConfigDict(
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "max_position_embeddings": 256,
            "initializer_range": 0.08,
        }
    )
    c.vocab_size = 400
    c.mesh = ConfigDict({"data": -1})
    c.tasks = ConfigDict({"common": ("make_b",), "rare": ("make_a",), "never": ()})
    c.harnesses = ("bash", "text")
    c.sandbox = "bubblewrap"
    c.demonstrations = ConfigDict({"common": 40, "rare": 40, "mistake_share": 0.0})
    c.sft = sft_config(
        stages=(
            stage_config(row_length=128, batch_rows=8, epochs=24.0, lr=5e-3, warmup=5),
            stage_config(row_length=256, batch_rows=4, epochs=2.0, lr=1e-3, warmup=2),
        ),
        save_every=20,
    )
    c.rl = rl_config(
        steps=12, group_size=8, groups_per_step=2, queue_groups=6, export_every=2, lr=2e-3, row_length=256, save_every=4
    )
    c.sampling = ConfigDict({"max_new_tokens": 48, "slots": 16})
    c.sampler = ConfigDict({"kind": "embedded"})
    c.eval = ConfigDict(
        {
            "tasks_per_template": 2,
            "samples": 8,
            "seeds": (1, 2),
            "temperature": 1.0,
            "top_p": 0.95,
            "greedy_temperature": 0.05,
        }
    )
    return c
