"""The jobs a config can name: what `python -m north_jax.main` runs.

Everything a job makes lies in its workdir; `serve` makes nothing, and takes none.
"""

import os
from pathlib import Path

import jax
from ml_collections import ConfigDict

from north_jax.envs import SandboxUnavailable
from north_jax.parallel import processes
from north_jax.pipeline import run_pipeline
from north_jax.weights.checkpoint import CheckpointError

# Errors that are a sentence for the user; anything else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, CheckpointError, SandboxUnavailable)

JOBS = {"pipeline": lambda config, workdir: run_pipeline(config, workdir)}


def run(config: ConfigDict, workdir: str | None) -> None:
    """Runs the config's job. Raises ValueError for a job that is not known, or that lacks its workdir."""
    if config.job == "serve":
        if jax.process_count() > 1:
            raise ValueError("a sampler is one process: run config.job serve without --distributed")
        return _serve(config)
    if config.job not in JOBS:
        raise ValueError(f"config.job is {config.job!r}; known jobs: {', '.join(sorted([*JOBS, 'serve']))}")
    if workdir is None:
        raise ValueError(f"--workdir must have a value: the job {config.job} keeps all that it makes there")
    path = Path(workdir).resolve()
    path.mkdir(parents=True, exist_ok=True)
    text = config.to_json_best_effort(indent=1)
    if processes.first():
        (path / "config.json").write_text(text)
    processes.meet()
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not one folder for all processes: give a --workdir on a disk that they share")
    JOBS[config.job](config, path)
    processes.meet()


def _serve(config: ConfigDict) -> None:
    """Serves config.checkpoint until told to stop."""
    from north_jax.sampler.server import serve

    if not config.checkpoint:
        raise ValueError("nothing to serve; give a Hugging Face folder as --config.checkpoint=DIR")
    status = serve(
        os.path.abspath(config.checkpoint),
        config.host,
        config.port,
        config.slots,
        config.context,
        queue=config.queue,
        drain_s=config.drain_s,
        allow_anyone=config.allow_anyone,
        interactive=True,
        **config.engine,
    )
    if status == 1:
        raise ValueError("the sampler has died; the lines above say of what")
