"""The whole line at small size: tasks, demonstrations, two-stage SFT, export, asynchronous RL, evaluation, report.

    make demo        # = python -m north_jax.main --config=configs/demo.py --workdir=runs/demo

Wants 2 CPU cores and 8 GB; about 15 minutes. Leaves runs/demo/report.html and results.json.
Should reach: held-out pass@1 (temperature 1.0, top_p 0.95) 8 points or more above the SFT model it started from;
the run in the README went from 64.4 to 79.5 %.
"""

from ml_collections import ConfigDict

from north_jax.rl.learner import rl_config
from north_jax.train.sft import sft_config, stage_config

# What SFT shows often, what it shows rarely, and what no training ever shows. RL trains on the first two.
COMMON = (
    "create_file", "append_line", "delete_file", "rename_file", "copy_file", "move_into", "first_line", "follow_note",
    "wrong_operator", "wrong_constant", "wrong_text",
)  # fmt: skip
RARE = (
    "count_lines", "last_line", "find_file", "drop_lines", "join_files", "count_word", "make_executable", "sort_lines",
    "make_directory", "delete_named_in_note", "copy_named_in_note", "create_and_delete",
    "wrong_argument", "wrong_comparison", "wrong_key", "missing_return",
)  # fmt: skip
NEVER = ("rename_named_in_note", "copy_and_append", "wrong_default")


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.job = "pipeline"
    c.seed = 0

    # The released architecture at 1/30,000 of its size; every kind of layer occurs.
    c.model = ConfigDict(
        {
            "hidden_size": 128,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 64,
            "prefix_dense_intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "max_position_embeddings": 512,
            "initializer_range": 0.06,
            # Backends: of pallas_kernels.attention, how experts are computed, and how tokens get to those of other
            # devices (north_jax.model.Decoder).
            "attention": "auto",
            "moe": "auto",
            "exchange": "auto",
        }
    )
    c.vocab_size = 560

    # Devices: data x fsdp x expert x context x tensor; -1 is what is left. Or a preset, as "v5p-128" (docs/meshes.md).
    c.mesh = ConfigDict({"preset": "", "data": -1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1})

    c.tasks = ConfigDict({"common": COMMON, "rare": RARE, "never": NEVER})
    c.harnesses = ("bash", "editor", "text")
    c.sandbox = "bubblewrap"  # or "docker"

    # Demonstrations per template; a mistake is always shown together with its recovery, and is not trained on.
    c.demonstrations = ConfigDict({"common": 240, "rare": 16, "mistake_share": 0.15})

    c.sft = sft_config(
        stages=(
            stage_config(row_length=256, batch_rows=8, epochs=4.0, lr=3e-3, warmup=20, decay="constant"),
            stage_config(row_length=512, batch_rows=4, epochs=0.75, lr=2e-3, warmup=5),
        ),
        save_every=100,
    )

    c.rl = rl_config(
        steps=120,
        group_size=8,
        groups_per_step=8,
        queue_groups=24,
        window=0.3,
        export_every=4,
        lr=3e-4,
        ratio_cap=5.0,
        row_length=384,
        save_every=20,
    )

    # The recipe's sampling: RL at temperature 1 without truncation, evaluation at 1.0 / 0.95.
    c.sampling = ConfigDict({"max_new_tokens": 96, "slots": 64})
    c.sampler = ConfigDict({"kind": "embedded"})  # or "sglang", after `make sglang`

    c.eval = ConfigDict()
    c.eval.tasks_per_template = 4
    c.eval.samples = 8
    c.eval.seeds = (1, 2, 3)
    c.eval.temperature = 1.0
    c.eval.top_p = 0.95
    c.eval.greedy_temperature = 0.05
    return c
