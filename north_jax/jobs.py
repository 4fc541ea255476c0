"""The jobs a config can name: what `python -m north_jax.main` runs. Everything a job makes lies in its workdir."""

from pathlib import Path

from ml_collections import ConfigDict

from north_jax.envs import SandboxUnavailable
from north_jax.pipeline import run_pipeline
from north_jax.weights.checkpoint import CheckpointError

# Errors that are a sentence for the user; anything else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, CheckpointError, SandboxUnavailable)

JOBS = {"pipeline": lambda config, workdir: run_pipeline(config, workdir)}


def run(config: ConfigDict, workdir: str) -> None:
    """Runs the config's job. Raises ValueError for a job that is not known."""
    if config.job not in JOBS:
        raise ValueError(f"config.job is {config.job!r}; known jobs: {', '.join(sorted(JOBS))}")
    path = Path(workdir).resolve()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config.to_json_best_effort(indent=1))
    JOBS[config.job](config, path)
