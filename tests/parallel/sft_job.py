"""An SFT run of seconds, for `python -m north_jax.main`: the tiny model and corpus of tests/train.

The environment can have it told to stop: STOP="1:5" sends process 1 a SIGTERM as it takes its 5th batch.
"""

import json
import os
import pathlib
import signal
import sys

from ml_collections import ConfigDict
from train_tiny import tiny_corpus, tiny_model

from north_jax import jobs
from north_jax.data import BatchIterator
from north_jax.parallel import make_mesh
from north_jax.train.sft import run_sft, sft_config, stage_config
from north_jax.weights import hf

_PROCESS = os.environ["JAX_PROCESS_ID"]
_written: set[str] = set()


def _watch(event: str, args: tuple) -> None:
    """What this process writes or renames."""
    if event == "open" and isinstance(args[0], str | os.PathLike) and args[2] & (os.O_WRONLY | os.O_RDWR):
        _written.add(os.fspath(args[0]))
    if event in ("os.rename", "os.remove", "os.rmdir"):
        _written.add(os.fspath(args[0]))


def _run(config: ConfigDict, workdir: pathlib.Path) -> None:
    who, _, at = os.environ.get("STOP", "").partition(":")
    taken, take = iter(range(1, 1000)), BatchIterator.__next__

    def next_batch(batches):
        if next(taken) == int(at or -1) and who == _PROCESS:
            signal.raise_signal(signal.SIGTERM)
        return take(batches)

    BatchIterator.__next__ = next_batch
    mesh = make_mesh(**config.mesh)
    model = run_sft(tiny_model(), [tiny_corpus(16)], config.sft, workdir / "sft", mesh)
    hf.save(workdir / "model", model, version=0, step=0)
    print("WRITTEN", json.dumps(sorted(path for path in _written if path.startswith(str(workdir)))))


def get_config() -> ConfigDict:
    sys.addaudithook(_watch)
    jobs.JOBS["sft"] = _run
    stages = (stage_config(row_length=16, batch_rows=8, epochs=2.0, lr=2e-2, warmup=2),)
    return ConfigDict(
        {"job": "sft", "mesh": {"fsdp": 2, "expert": 2}, "sft": sft_config(stages=stages, save_every=100)}
    )
