"""`tools/parity.py` as a person runs it."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from oracle import SEEDS
from safetensors.numpy import load_file, save_file

from north_jax.weights import load, save
from north_jax.weights.convert import convert

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "parity.py"


def run(folder, oracle):
    return subprocess.run(
        [sys.executable, str(TOOL), str(folder), "--oracle", str(oracle)], capture_output=True, text=True, timeout=280
    )


def test_accepts_the_recorded_model():
    done = run(SEEDS[0], SEEDS[0] / "oracle.npz")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 beyond tolerance" in done.stdout
    for quantity in (
        "len33/logits_window_plus_1",
        "pad_left/logits",
        "cached/prefill11",
        "grad/mean_nll",
        "greedy/new",
    ):
        assert quantity in done.stdout


def test_refuses_another_model(tmp_path):
    save(tmp_path / "c", load(SEEDS[0]), version=1, step=0)
    (tmp_path / "c" / "north_manifest.json").unlink()
    weights = load_file(tmp_path / "c" / "model.safetensors")
    weights["model.layers.2.mlp.gate.weight"] *= 1.01
    save_file(weights, tmp_path / "c" / "model.safetensors")
    # One sequence of the recording is enough to see it.
    with np.load(SEEDS[0] / "oracle.npz") as file:
        np.savez(
            tmp_path / "few.npz", **{name: file[name] for name in file.files if name.startswith(("len1/", "len9/"))}
        )
    done = run(tmp_path / "c", tmp_path / "few.npz")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BEYOND TOLERANCE" in done.stdout


def test_drift_against_another_folder(tmp_path):
    convert(SEEDS[0], tmp_path / "same", say=lambda text: None)
    convert(SEEDS[0], tmp_path / "fp8", dtype="bfloat16", scheme="fp8", say=lambda text: None)

    def drift(other):
        command = [sys.executable, str(TOOL), str(SEEDS[0]), "--against", str(other), "--tokens=32"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}

    same, fp8 = drift(tmp_path / "same"), drift(tmp_path / "fp8")
    assert same["logp_max"] == same["kl_mean"] == 0 and same["top1_share"] == 1
    assert 0.01 < fp8["logp_mean"] < fp8["logp_max"] and fp8["kl_mean"] > 0 and fp8["top1_share"] < 1
    assert abs(fp8["nll"] - same["nll"]) < 1e-4 < abs(fp8["nll_other"] - fp8["nll"])


@pytest.mark.parametrize("missing", ["folder", "recording"])
def test_bad_input_is_one_sentence(missing, tmp_path):
    folder = tmp_path / "nowhere" if missing == "folder" else SEEDS[0]
    done = run(folder, tmp_path / "none.npz")
    assert done.returncode == 2
    assert done.stderr.startswith("parity: ")
    assert done.stderr.count("\n") == 1
