"""Damaged folders: every one is refused by the name of what is damaged, none loads."""

import functools
import json
import random
import shutil

import pytest
from flax import nnx

from north_jax.model import Decoder, ModelConfig
from north_jax.weights import CheckpointError, load, save

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=8,
    prefix_dense_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=3,
    num_experts_per_tok=2,
    sliding_window=4,
    eos_token_id=3,
)
INDEX, MANIFEST = "model.safetensors.index.json", "north_manifest.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "whole"
    (path.parent / "tokenizer").mkdir()
    (path.parent / "tokenizer" / "tokenizer.json").write_text('{"model": {}}')
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    save(path, model, version=3, step=1, tokenizer_dir=path.parent / "tokenizer", max_shard_bytes=8_000)
    load(path)
    return path


# ---- damages: (folder, random numbers) -> the names of which one must be in the message ------------------------------


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def header(shard):
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(shard, about, data):
    text = json.dumps(about).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data)


def names_in(shard):
    return {shard.name, *(name for name in header(shard)[0] if name != "__metadata__")}


def truncate(folder, rng):
    shard = rng.choice(shards(folder))
    names = names_in(shard)
    shard.write_bytes(shard.read_bytes()[: rng.randrange(shard.stat().st_size)])
    return names


def flip_bytes(folder, rng, choose=shards, bits=1):
    file = rng.choice(choose(folder))
    names = names_in(file) if file.suffix == ".safetensors" else {file.name}
    data = bytearray(file.read_bytes())
    for _ in range(bits):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if bytes(data) == file.read_bytes():  # the same bit twice
        data[0] ^= 1
    file.write_bytes(data)
    return names


def flip_a_header(folder, rng):
    shard = rng.choice(shards(folder))
    names = names_in(shard)
    data = bytearray(shard.read_bytes())
    data[rng.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << rng.randrange(8)
    shard.write_bytes(data)
    return names


def rename_a_file(folder, rng):
    file = rng.choice([*shards(folder), folder / INDEX, folder / "config.json", folder / "tokenizer.json"])
    file.rename(file.with_name(f"x{file.name}"))
    return {file.name, INDEX}


def rename_a_tensor(folder, rng):
    shard = rng.choice(shards(folder))
    about, data = header(shard)
    name = rng.choice([name for name in about if name != "__metadata__"])
    other = name.replace("weight", "wieght") if rng.random() < 0.5 else name.replace("model", "language_model.model")
    write(shard, {(other if key == name else key): value for key, value in about.items()}, data)
    return {name, other, shard.name}


def drop_a_tensor(folder, rng):
    shard = rng.choice(shards(folder))
    about, data = header(shard)
    name = rng.choice([name for name in about if name != "__metadata__"])
    write(shard, {key: value for key, value in about.items() if key != name}, data)
    return {name, shard.name}


def drop_a_key(folder, rng, file=None):
    file = folder / (file or rng.choice(["config.json", INDEX, MANIFEST, "generation_config.json"]))
    value = json.loads(file.read_text())
    inner = value["weight_map"] if file.name == INDEX else value
    key = rng.choice(sorted(inner))
    del inner[key]
    file.write_text(json.dumps(value))
    return {file.name, key}


def experts(folder):
    found = []
    for shard in shards(folder):
        found += [(shard, name) for name in header(shard)[0] if ".experts." in name]
    return found


def swap_shapes_of_experts(folder, rng):
    names = set()
    for shard, name in rng.sample(experts(folder), 2):
        about, data = header(shard)
        about[name]["shape"].reverse()
        write(shard, about, data)
        names |= {name, shard.name}
    return names


def swap_values_of_experts(folder, rng):
    def place(shard, name):
        about, data = header(shard)
        start, stop = about[name]["data_offsets"]
        return about, data, start, stop

    (a, name_a), (b, name_b) = rng.sample([e for e in experts(folder) if "up_proj" in e[1]], 2)
    about, data, start, stop = place(a, name_a)
    _, data_b, start_b, stop_b = place(b, name_b)
    first, second = data[start:stop], data_b[start_b:stop_b]
    write(a, about, data[:start] + second + data[stop:])
    about, data, start, stop = place(b, name_b)
    write(b, about, data[:start] + first + data[stop:])
    return {name_a, name_b, a.name, b.name}


def a_tensor_twice(folder, rng):
    one, other = rng.sample(shards(folder), 2)
    about, data = header(one)
    name = rng.choice([name for name in about if name != "__metadata__"])
    start, stop = about[name]["data_offsets"]
    about_other, data_other = header(other)
    about_other[name] = about[name] | {"data_offsets": [len(data_other), len(data_other) + stop - start]}
    write(other, about_other, data_other + data[start:stop])
    return {name, other.name}


STRUCTURE = (truncate, rename_a_tensor, drop_a_tensor, swap_shapes_of_experts, a_tensor_twice)
VALUES = (
    flip_bytes,
    functools.partial(flip_bytes, bits=5),
    functools.partial(flip_bytes, choose=lambda folder: sorted(folder.glob("*.json"))),
    flip_a_header,
    rename_a_file,
    drop_a_key,
    swap_values_of_experts,
)


def refused(whole, folder, damage, rng):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    names = damage(folder, rng)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message and any(name in message for name in names), (message, names)


@pytest.mark.parametrize("damage", [*STRUCTURE, *VALUES])
def test_damage_to_a_folder_of_ours_is_refused_by_name(whole, tmp_path, damage):
    for case in range(25):
        refused(whole, tmp_path / "damaged", damage, random.Random(case))


@pytest.mark.parametrize("damage", [*STRUCTURE, functools.partial(drop_a_key, file=INDEX)])
def test_damage_to_the_structure_of_anyones_folder_is_refused_by_name(whole, tmp_path, damage):
    shutil.copytree(whole, tmp_path / "published")
    (tmp_path / "published" / MANIFEST).unlink()
    load(tmp_path / "published")
    for case in range(25):
        refused(tmp_path / "published", tmp_path / "damaged", damage, random.Random(case))
