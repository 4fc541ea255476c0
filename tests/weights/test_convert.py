"""Conversions: nothing lost on the way, resumed when interrupted, refused where they would overwrite or not fit."""

import gc
import json
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from oracle import SEEDS
from same import same_bytes

from north_jax.model import Decoder, ModelConfig
from north_jax.parallel import make_mesh
from north_jax.weights import (
    CheckpointError,
    convert,
    export,
    load,
    parity,
    quantize,
    read_config,
    read_tensors,
    save,
    to_tensors,
)

SEED = SEEDS[0]
TOOL = pathlib.Path(__file__).parents[2] / "tools" / "convert.py"


def quietly(*args, **kwargs):
    return convert.convert(*args, say=lambda text: None, **kwargs)


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "parameters of seed0"
    quietly(SEED, path, to="orbax")
    return path


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2}, {"expert": 2, "tensor": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}])
def test_an_orbax_folder_restores_on_any_mesh_and_converts_back(orbax, sizes, tmp_path):
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    model = load(orbax, mesh=mesh)
    assert model.layers[1].mlp.gate_EDF[...].sharding.mesh == mesh
    same_bytes(to_tensors(model), read_tensors(SEED))
    quietly(orbax, tmp_path / "back")
    same_bytes(read_tensors(tmp_path / "back"), read_tensors(SEED))
    assert read_config(tmp_path / "back") == read_config(SEED)


def test_carried_files_and_version_go_all_the_way_round(tmp_path):
    source = tmp_path / "source"
    quietly(SEED, source)
    (source / "chat_template.jinja").write_bytes("{{ 'ü' }}\r\n".encode())
    (source / "tokenizer.json").write_bytes(b'{"x":   1}')
    (source / "generation_config.json").write_bytes(b'{"temperature":   0.7}')
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / "north_manifest.json").write_text(json.dumps(manifest(source, weight_version="17", step=68)))
    quietly(source, tmp_path / "orbax", to="orbax")
    quietly(tmp_path / "orbax", tmp_path / "back", max_shard_bytes=100_000)
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
    about = json.loads((tmp_path / "back" / "north_manifest.json").read_text())
    assert (about["weight_version"], about["step"]) == ("17", 68)
    load(tmp_path / "back")


def manifest(folder, **changes):
    from north_jax.weights.folder import json_checksum

    about = json.loads((folder / "north_manifest.json").read_text()) | changes
    about["files"] = {}
    del about["self"]
    return about | {"self": json_checksum(about)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_the_rounding_of_every_tensor(dtype, tmp_path):
    quietly(SEED, tmp_path / "cast", dtype=dtype)
    original, cast = read_tensors(SEED), read_tensors(tmp_path / "cast")
    same_bytes(cast, {name: value.astype(cast[name].dtype) for name, value in original.items()})
    assert {str(value.dtype) for value in cast.values()} == {dtype}
    assert read_config(tmp_path / "cast").dtype == dtype


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_a_quantised_folder_loads_and_drifts_little(seed, scheme, tmp_path):
    said = []
    convert.convert(seed, tmp_path / "q", scheme=scheme, dtype="bfloat16", say=said.append)
    assert "matrices quantised, relative error 0.0" in said[-1]
    lines = [json.loads(line) for line in (tmp_path / "q" / convert.ERRORS).read_text().splitlines()]
    names = {name for name in read_tensors(seed) if quantize.is_quantised(name)}
    assert {line["tensor"] for line in lines} == names and len(lines) == len(names)
    assert 0.01 < max(line["relative"] for line in lines) < 2**-4
    stored = read_tensors(tmp_path / "q")
    assert {str(stored[name].dtype) for name in names} == {"float8_e4m3fn"}
    assert {str(value.dtype) for name, value in stored.items() if "mlp.gate." in name or "norm" in name} == {"bfloat16"}
    # On a mesh as well, and as a folder to convert from.
    whole = to_tensors(load(tmp_path / "q"))
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    same_bytes(to_tensors(load(tmp_path / "q", mesh=mesh)), whole)
    quietly(tmp_path / "q", tmp_path / "wide")
    same_bytes(read_tensors(tmp_path / "wide"), whole)


def test_an_int4_folder_loads_and_drifts_little(tmp_path):
    config = ModelConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        prefix_dense_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        initializer_range=0.05,
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    save(tmp_path / "whole", model, version=0, step=0)
    quietly(tmp_path / "whole", tmp_path / "int4", scheme="int4", dtype="bfloat16")
    stored = read_tensors(tmp_path / "int4")
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    assert stored[f"{name}_packed"].shape == (128, 16) and stored[f"{name}_scale"].shape == (128, 1)
    restored = load(tmp_path / "int4", dtype="float32", mesh=make_mesh(fsdp=2, expert=2, tensor=2))
    own, back = to_tensors(model), to_tensors(restored)
    for name in own:
        error = np.linalg.norm(back[name] - own[name]) / np.linalg.norm(own[name])
        assert error < (0.15 if quantize.is_quantised(name) else 0.003), (name, error)
    ids_BS = np.random.default_rng(0).integers(0, 64, (4, 24))
    lost = parity.drift(model, load(tmp_path / "int4", dtype="float32"), ids_BS)
    assert 0 < lost["kl_mean"] < 0.05, lost  # measured: 0.011


def test_int4_needs_groups_that_divide(tmp_path):
    with pytest.raises(ValueError, match=r"o_proj.weight|k_proj.weight|down_proj.weight"):
        quietly(SEED, tmp_path / "q", scheme="int4", dtype="bfloat16")
    assert not list(tmp_path.iterdir())


# ---- interruption ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_an_interrupted_conversion_goes_on_where_it_was(to, tmp_path, monkeypatch):
    options = {"to": to, "max_shard_bytes": 150_000}
    quietly(SEED, tmp_path / "straight", **options)
    finished = export.FolderWriter.finish
    parts = []

    def stop_at_the_third(self, part, about):
        if len(parts) == 2:
            raise Stop
        parts.append(part)
        finished(self, part, about)

    monkeypatch.setattr(export.FolderWriter, "finish", stop_at_the_third)
    with pytest.raises(Stop):
        quietly(SEED, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    folder = partial / "parameters" if to == "orbax" else partial
    inodes = {part: (folder / part).stat().st_ino for part in parts}

    monkeypatch.setattr(export.FolderWriter, "finish", finished)
    quietly(SEED, tmp_path / "out", **options)
    folder = tmp_path / "out" / "parameters" if to == "orbax" else tmp_path / "out"
    assert {part: (folder / part).stat().st_ino for part in parts} == inodes  # not written again
    assert not partial.exists() and not list((tmp_path / "out").glob("finished*"))
    same_bytes(to_tensors(load(tmp_path / "out")), read_tensors(SEED))
    straight, resumed = (tmp_path / name / "north_manifest.json" for name in ("straight", "out"))
    assert straight.read_text() == resumed.read_text()


def test_a_conversion_with_other_options_begins_anew(tmp_path, monkeypatch):
    calls = []
    real = export.FolderWriter.finish

    def once(self, part, about):
        real(self, part, about)
        calls.append(part)
        if len(calls) == 1:
            raise Stop

    monkeypatch.setattr(export.FolderWriter, "finish", once)
    with pytest.raises(Stop):
        quietly(SEED, tmp_path / "out", max_shard_bytes=150_000)
    quietly(SEED, tmp_path / "out", max_shard_bytes=300_000, dtype="bfloat16")
    assert {str(value.dtype) for value in read_tensors(tmp_path / "out").values()} == {"bfloat16"}


def test_killed_at_any_time_it_ends_the_same(tmp_path):
    """The process is really killed, at random times, until it is through."""
    command = [sys.executable, TOOL, SEED, tmp_path / "out", "--shard_gb=0.00012"]
    rng, kills = random.Random(0), 0
    while not (tmp_path / "out").exists():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            assert process.wait(None if kills == 3 else 1.0 + 2.5 * rng.random()) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    same_bytes(read_tensors(tmp_path / "out"), read_tensors(SEED))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_bad_requests_are_one_sentence_and_change_nothing(tmp_path, capfd, orbax):
    sys.path.insert(0, str(TOOL.parent))
    import convert as tool

    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("data")
    for arguments, words in (
        ([SEED, target], "exists already; choose another place"),
        ([tmp_path / "nowhere", tmp_path / "x"], "nowhere/config.json does not exist"),
        ([SEED, tmp_path / "x", "--to=orbax", "--quantise=fp8"], "quantised folders are of kind 'hf'"),
        ([SEED, tmp_path / "x", "--quantise=int4"], "do not divide into groups of 128"),
    ):
        assert tool.main([str(argument) for argument in arguments]) == 2
        message = capfd.readouterr().err
        assert words in message and message.startswith("convert: ") and message.count("\n") == 1, message
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and (target / "precious").read_text() == "data"


def test_a_dry_run_says_it_all_and_writes_nothing(tmp_path, capfd):
    sys.path.insert(0, str(TOOL.parent))
    import convert as tool

    assert tool.main([str(SEED), str(tmp_path / "x"), "--quantise=fp8", "--dtype=bfloat16", "--dry_run"]) == 0
    table = capfd.readouterr().out
    total = sum(value.nbytes for value in read_tensors(SEED).values())
    assert f"{130:,d}" in table and f"{total / 1000:.3g} kB" in table and "disk:" in table and "memory:" in table
    assert not list(tmp_path.iterdir())


def test_the_plan_of_the_released_model_fits_a_small_machine():
    """61 GB through less than 2.5 GB of memory, by the plan."""
    sys.path.insert(0, str(TOOL.parents[1]))
    from configs.model.north_mini_code import get_config
    from north_jax.weights.names import manifest

    config = ModelConfig.from_hf(get_config().to_dict())
    entries = manifest(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    shards = export.shards_of(
        [(export.Planned(name, e.shape, np.dtype("bfloat16")),) for name, e in entries.items()], export.SHARD_BYTES
    )
    assert len(entries) == 18_730 and sum(export.nbytes(u) for s in shards.values() for u in s) == 60_968_607_744
    assert max(sum(map(export.nbytes, shard)) for shard in shards.values()) <= export.SHARD_BYTES


# Orbax leaves the coroutines of its other reads behind when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["missing item", "flipped bit", "missing file", "manifest", "config"])
def test_a_damaged_orbax_folder_is_refused_by_name(orbax, damage, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(orbax, folder)
    item = folder / "parameters" / "layers.2"
    files = sorted((file for file in item.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    if damage == "missing item":
        shutil.rmtree(item)
    elif damage == "flipped bit":
        data = bytearray(files[-1].read_bytes())
        data[len(data) // 2] ^= 4
        files[-1].write_bytes(data)
    elif damage == "missing file":
        files[-1].unlink()
    elif damage == "manifest":
        (folder / "north_manifest.json").write_text("{")
    else:
        config = json.loads((folder / "config.json").read_text()) | {"num_experts": 4}
        (folder / "config.json").write_text(json.dumps(config))
    for use in (load, lambda path: quietly(path, tmp_path / "out")):
        with pytest.raises(CheckpointError) as error:
            use(folder)
        message = str(error.value)
        gc.collect()
        names = {"manifest": "north_manifest.json", "config": "layers.1"}
        assert names.get(damage, "layers.2") in message and "\n" not in message, message


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_disk_that_is_too_small_is_said_before_anything_is_written(small_disk, to):
    with pytest.raises(OSError, match=r"has 717 kB free where 993 kB are needed; make room there"):
        quietly(SEED, small_disk / "out", to=to)
    assert not list(small_disk.iterdir())
