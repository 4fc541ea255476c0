"""What a user types wrong at the command line gets one sentence and exit code 1."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--config=configs/nope.py"],
            "error: there is no config file configs/nope.py; configs/ holds",
        ),
        (
            ["--config=configs/demo.py", "--config.rl.nope=3"],
            "error: --config has no setting 'nope'; configs/demo.py shows what there is",
        ),
        (["--config=configs/demo.py", "--config.rl.steps=many"], "invalid literal for int() with base 10: 'many'"),
        (
            ["--config=configs/demo.py", "--config.job=dance"],
            "error: config.job is 'dance'; known jobs: pipeline",
        ),
        (
            ["--config=configs/serve.py"],
            "error: nothing to serve; give a Hugging Face folder as",
        ),
        (["--config=configs/serve.py", "--config.checkpoint=/nowhere"], "error: /nowhere"),
        (
            ["--config=configs/serve.py", "--config.checkpoint=/nowhere", "--config.host=0.0.0.0"],
            "error: on 0.0.0.0 anybody who reaches this machine could use and control the sampler; give an API key",
        ),
        (["--config=configs/demo.py", "rl.steps=3"], "error: unexpected argument 'rl.steps=3'; settings are given as"),
        (
            ["--config=configs/demo.py", "--config.sandbox=vm"],
            "error: there is no sandbox of the kind 'vm': use 'bubblewrap' or 'docker'",
        ),
        (
            ["--config=configs/demo.py", "--config.mesh.preset=v5p-128"],
            "error: mesh preset v5p-128 is 64 devices and here are 8: choose another or give the axes' sizes",
        ),
    ],
)
def test_one_sentence(arguments, sentence, tmp_path):
    command = [sys.executable, "-m", "north_jax.main", *arguments, f"--workdir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert sentence in lines[-1] and not any("Traceback" in line for line in lines), done.stderr


def test_several_processes_need_a_cluster(tmp_path):
    command = [sys.executable, "-m", "north_jax.main", "--config=configs/demo.py", f"--workdir={tmp_path}/run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "SLURM_"))}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [*command, "--distributed"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "error: --distributed: JAX finds no cluster here (TPU pod, Slurm, Open MPI): " in done.stderr


def test_a_workdir_is_needed():
    command = [sys.executable, "-m", "north_jax.main", "--config=configs/demo.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--workdir must have a value" in done.stderr
