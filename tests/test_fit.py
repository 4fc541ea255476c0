"""tools/fit.py as far as it goes without the compilers; with them, docs/meshes.md has its figures."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from north_jax.parallel import make_mesh
from pallas_kernels import aot
from tools import fit


def test_without_a_compiler_it_says_what_to_install(capsys):
    try:
        aot.devices("v5p")
        pytest.skip("the compiler for v5p is installed")
    except RuntimeError:
        pass
    with pytest.raises(SystemExit) as left:
        fit.main(["v5p:2x2x1", "--mesh", "fsdp=4", "--sequence", "4096", "--rows", "4"])
    assert left.value.code == 1
    said = capsys.readouterr().out
    assert "v5p:2x2x1, fsdp=4: sft, 4 rows of 4,096" in said and "pip install 'north_jax[aot]'" in said


def test_a_row_for_every_device_that_has_its_own():
    assert fit.rows_of("fsdp=16,expert=4,context=2,tensor=2") == 64


def test_a_preset_is_its_slice_and_mesh(monkeypatch):
    asked = []
    monkeypatch.setattr(fit, "figures", lambda *run: asked.append(run[:2]) or {"fits": True})
    monkeypatch.setattr(fit, "show", lambda cell: None)
    for argv in (["v5p-128"], ["v5p-128", "--mesh", "fsdp=64"], ["v5p:2x2x1"]):
        with pytest.raises(SystemExit):
            fit.main(argv)
    assert asked == [("v5p:4x4x4", "fsdp=16,expert=4"), ("v5p:4x4x4", "fsdp=64"), ("v5p:2x2x1", "fsdp=-1")]


def test_what_is_held_is_counted_by_shard():
    split = NamedSharding(make_mesh(fsdp=4, tensor=2), PartitionSpec("fsdp"))
    assert fit.held({"a": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16, sharding=split)}) == 12
