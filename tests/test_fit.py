"""tools/fit.py as far as it goes without the compilers; with them, docs/meshes.md has its figures."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from configs.model.north_mini_code import get_config as released
from north_jax.model import ModelConfig
from north_jax.parallel import make_mesh
from pallas_kernels import aot
from tools import fit, fit_page, fit_search


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


NORTH = ModelConfig.from_hf(released().to_dict())
PARAMETERS = 1_493_275_000, 28_991_029_248  # dense, of experts


def test_the_search_tries_what_divides_and_the_fewest_bytes_first():
    found = fit_search.by_cost(NORTH, 64, 131072, 16, PARAMETERS)
    costs = [fit_search.sent(NORTH, mesh, 131072, 16, PARAMETERS) for mesh in found]
    assert costs == sorted(costs) and len(found) > 10
    for mesh in found:
        assert math.prod(mesh.values()) == 64 and 16 % (mesh["fsdp"] * mesh["expert"]) == 0
        assert mesh["tensor"] in (1, 2, 4)  # key/value heads
    assert not fit_search.by_cost(NORTH, 64, 131071, 3, PARAMETERS)


def test_closed_forms_are_what_a_matrix_alone_sends():
    """fsdp alone: three times all parameters but its own part, in bfloat16."""
    mesh = {"fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    assert fit_search.sent(NORTH, mesh, 1024, 8, PARAMETERS) == pytest.approx(3 * 7 / 8 * sum(PARAMETERS) * 2)


def test_most_tokens_lie_on_the_line():
    assert fit_search.most_tokens([(65536, 20 * 2**30), (131072, 30 * 2**30)], 45 * 2**30) == 131072 + 98304


def test_the_page_shows_every_cell_and_what_does_not_fit():
    cell = {
        "slice": "v5p:4x4x4", "mesh": "fsdp=64", "job": "sft", "sequence": 65536, "rows": 64, "remat": "block",
        "parameters_bytes": 2**30, "optimizer_bytes": 4 * 2**30, "total_bytes": 20 * 2**30,
        "capacity_bytes": 40 * 2**30, "host_bytes": 2**30, "collectives": [{"bytes": 2**30}],
        "computing_seconds": 1.5, "sending_seconds": 0.5, "mfu_at_most": 1.0, "compile_seconds": 9.0, "fits": True,
    }  # fmt: skip
    html = fit_page.page({"jax": "0"}, [cell, cell | {"fits": False}, cell | {"error": "<too large>"}])
    assert html.count("20.0 of 40") == 2 and html.count("width:37.50%") == 2  # 15 of 40 GiB are neither
    assert '<span class="no">no</span>' in html and "&lt;too large&gt;" in html


def test_the_docs_have_the_cells_that_were_compiled():
    docs = pathlib.Path(__file__).parents[1] / "docs"
    found = json.loads((docs / "fit.json").read_text())
    assert fit_page.table(found["cells"]) in (docs / "meshes.md").read_text()
    assert all(f"{name} {found['versions'][name]}" in (docs / "meshes.md").read_text() for name in ("jax", "libtpu"))


def test_a_matrix_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    asked = []

    def figures(slice_, mesh, job, sequence, rows, options):
        asked.append((slice_, job, sequence))
        if len(asked) == 5:
            raise KeyboardInterrupt
        names = {"slice": slice_, "mesh": mesh, "job": job, "sequence": sequence, "rows": rows}
        return names | options | {"fits": True}

    monkeypatch.setattr(fit, "figures", figures)
    monkeypatch.setattr(fit, "show", lambda cell: None)
    monkeypatch.setattr(fit, "table", lambda cells: "")
    command = ["matrix", "--json", str(tmp_path / "fit.json")]
    with pytest.raises(KeyboardInterrupt):
        fit.main(command)
    with pytest.raises(SystemExit):
        fit.main(command)
    assert len(asked) == 1 + len(fit.matrix()) and asked[4] == asked[5]
    with pytest.raises(SystemExit):
        fit.main([*command, "--remat", "offload"])
    assert len(asked) == 1 + 2 * len(fit.matrix())


def test_a_node_is_eight_gpus():
    mesh = make_mesh(data=1, fsdp=2, expert=4)
    wide = make_mesh(data=2, expert=2, tensor=2)
    assert fit.link("h200", mesh, ("expert",)) == fit.link("h200", wide, ("tensor", "expert")) == fit.LINKS["h200"]
    sixteen = AbstractMesh((4, 2, 2), ("fsdp", "expert", "tensor"))
    assert fit.link("h200", sixteen, ("expert", "tensor")) == fit.LINKS["h200"]
    assert fit.link("h200", sixteen, ("fsdp",)) == fit.BETWEEN_NODES and fit.link("v5p", sixteen, ("fsdp",)) == 600e9


def test_tokens_of_a_device_whatever_the_mesh_leaves_open(monkeypatch, capsys):
    """64 rows on 32 devices: 20 GiB at 65,536 tokens a device, 30 at 131,072, and 90 to fill."""

    def figures(slice_, mesh, job, sequence, rows, options):
        return {"devices": 32, "total_bytes": (10 + sequence * 20 // 65536) * 2**30, "capacity_bytes": 100 * 2**30}

    monkeypatch.setattr(fit, "figures", figures)
    monkeypatch.setattr(fit, "show", lambda cell: None)
    with pytest.raises(SystemExit) as left:
        fit.main(["v5p:2x4x4", "--max_tokens", "--sequence", "65536"])
    assert left.value.code == 0 and "max_tokens_per_device: 524,288" in capsys.readouterr().out
