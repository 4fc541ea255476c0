"""What `tools/bench.py kernels` does on an accelerator, on small shapes here: its checks, its table, its refusal."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import bench_kernels as bench  # noqa: E402

SMALL = bench.Shape(64, 4, 2, 32, window=16, document=32)


def test_contestants_agree_and_one_that_is_wrong_stands_out(monkeypatch):
    monkeypatch.setitem(bench.NORTH, "small", SMALL)
    rows = {row.name: row for row in bench.attention_rows("small", SMALL)}
    assert {"ours", "XLA"} <= set(rows)
    for row in rows.values():
        assert not row.why and row.error < 1.1 and 0 < row.forward < row.both, row
    blind = bench.attention_error(lambda q, k, v: jnp.zeros_like(q), SMALL)
    assert blind > 50
    lines = bench.table([*rows.values(), bench.Row("attention", "small", "other", why="Error: no")], 1e12).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and "Error: no" in lines[-1]


def test_the_experts_layer_has_three_ways_that_agree(monkeypatch):
    for name, size in (("WIDTH", 16), ("EXPERT", 8), ("EXPERTS", 16)):
        monkeypatch.setattr(bench, name, size)
    rows = {row.name: row for row in bench.experts_rows(24)}
    assert {"ours", "ragged_dot"} <= set(rows)
    for row in rows.values():
        assert not row.why and row.error < 1.1, row


def test_what_fails_is_reported_and_the_rest_goes_on(monkeypatch):
    def broken(*_, **__):
        raise NotImplementedError("no such mask\nand more")

    monkeypatch.setattr(bench, "attention_contestants", lambda shape: {"ours": broken})
    assert [row.why for row in bench.attention_rows("small", SMALL)] == ["NotImplementedError: no such mask"]


def test_a_call_that_takes_longer_is_found_to():
    short, long = (
        bench.seconds(jax.jit(lambda x, n=n: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y), x)), [(jnp.ones(64),)])
        for n in (1_000, 100_000)
    )
    assert long > 10 * short


def test_without_an_accelerator_it_says_what_to_do():
    command = [sys.executable, "tools/bench.py", "kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "no accelerator is here" in done.stderr
