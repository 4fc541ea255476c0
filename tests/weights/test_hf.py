"""Hugging Face folders: bytes that survive, what is refused and in which words, and that transformers reads ours."""

import dataclasses
import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import SEEDS
from safetensors.numpy import load_file, save_file
from same import same_bytes

from north_jax.model import Decoder, ModelConfig
from north_jax.weights import CheckpointError, from_tensors, load, read_config, read_tensors, save, to_tensors

CASES = [pytest.param(seed, id=seed.name) for seed in SEEDS]
SMALL = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    prefix_dense_intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    initializer_range=0.2,
    eos_token_id=3,
    max_position_embeddings=64,
)
NAME = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000])
def test_load_then_save_keeps_every_byte(seed, max_shard_bytes, tmp_path):
    save(tmp_path / "out", load(seed), version="v7", step=12, max_shard_bytes=max_shard_bytes)
    same_bytes(read_tensors(tmp_path / "out"), read_tensors(seed))
    assert read_config(tmp_path / "out") == read_config(seed)
    manifest = json.loads((tmp_path / "out" / "north_manifest.json").read_text())
    assert (manifest["weight_version"], manifest["step"]) == ("v7", 12)
    assert manifest["checksums"].keys() == read_tensors(seed).keys()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    expected = json.loads((seed / "generation_config.json").read_text())
    assert {key: generation[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        key: expected[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if max_shard_bytes == 200_000:
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert len(shards) > 4
        assert max((tmp_path / "out" / shard).stat().st_size for shard in shards) < 250_000
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(seed).values())
    else:
        assert shards == ["model.safetensors"]
    # And once more from our own folder.
    same_bytes(to_tensors(load(tmp_path / "out")), read_tensors(seed))


def test_bfloat16_survives_and_casts(tmp_path):
    model = Decoder(SMALL, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    save(tmp_path / "a", model, version=1, step=0)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    same_bytes(read_tensors(tmp_path / "a"), to_tensors(model))
    wide = load(tmp_path / "a", dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(wide))} == {jnp.dtype("float32")}


def test_one_expert_stays_stacked(tmp_path):
    model = Decoder(dataclasses.replace(SMALL, num_experts=1, num_experts_per_tok=1), rngs=nnx.Rngs(0))
    save(tmp_path / "a", model, version=1, step=0)
    assert load(tmp_path / "a").layers[1].mlp.gate_EDF.shape == (1, 32, 16)


def test_weights_swap_into_a_model_in_place():
    model, other = Decoder(SMALL, rngs=nnx.Rngs(0)), Decoder(SMALL, rngs=nnx.Rngs(1))
    from_tensors(model, to_tensors(other))
    same_bytes(to_tensors(model), to_tensors(other))
    tensors = to_tensors(Decoder(SMALL, rngs=nnx.Rngs(2)))
    tensors[NAME] = tensors[NAME][1:]
    with pytest.raises(CheckpointError, match=NAME):
        from_tensors(model, tensors)
    same_bytes(to_tensors(model), to_tensors(other))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rms_norm_eps": None},
        {"norm_topk_prob": True, "first_k_dense_replace": 2, "logit_scale": 0.3},
        {"expert_selection_fn": "softmax", "prefix_dense_sliding_window_pattern": 2},
        {"first_k_dense_replace": 0, "sliding_window_pattern": 2, "num_key_value_heads": 4},
        {"first_k_dense_replace": 5, "num_key_value_heads": 1},
    ],
    ids=["north", "layer_norm", "normalised", "softmax", "no_prefix", "all_dense"],
)
def test_transformers_reads_what_we_save(changes, tmp_path):
    import torch
    import transformers

    model = Decoder(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(3))
    # Norm scales other than 1, so that a lost one shows.
    for param in (model.norm.scale_D, *(layer.norm.scale_D for layer in model.layers)):
        param.set_value(jax.random.uniform(jax.random.key(5), param.shape, minval=0.5, maxval=1.5))
    save(tmp_path / "a", model, version=1, step=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager")
    assert reference.dtype == torch.float32
    ids = np.random.default_rng(0).integers(1, SMALL.vocab_size, (2, 20))
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()
    ours = nnx.jit(lambda model, ids_BS: model(ids_BS))(model, jnp.asarray(ids))
    np.testing.assert_allclose(ours, expected, atol=5e-5, rtol=0)
    # The way back: what transformers saves is what we load.
    reference.save_pretrained(tmp_path / "b")
    assert read_config(tmp_path / "b") == read_config(tmp_path / "a")
    same_bytes(to_tensors(load(tmp_path / "b")), to_tensors(model))


@pytest.mark.parametrize("way", ["cast", "resharded", "orbax and back"])
def test_transformers_reads_what_we_convert(way, tmp_path):
    import torch
    import transformers

    from north_jax.weights.convert import convert

    seed = SEEDS[0]
    if way == "orbax and back":
        convert(seed, tmp_path / "orbax", to="orbax", say=lambda text: None)
        seed = tmp_path / "orbax"
    options = {"cast": {"dtype": "float16"}, "resharded": {"max_shard_bytes": 90_000}}.get(way, {})
    convert(seed, tmp_path / "out", say=lambda text: None, **options)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    ids = np.random.default_rng(1).integers(1, 500, (2, 20))
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()
    ours = load(tmp_path / "out", dtype=jnp.float32)(jnp.asarray(ids))
    np.testing.assert_allclose(ours, expected, atol=5e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")  # of loaders and quantisers that are not ours
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int4"])
def test_transformers_reads_what_we_quantise(scheme, tmp_path):
    import torch
    import transformers

    from north_jax.weights.convert import convert

    source = SEEDS[0]
    if scheme == "int4":  # wants inputs in groups of 128
        wide = dict.fromkeys(("hidden_size", "intermediate_size", "prefix_dense_intermediate_size"), 128)
        config = dataclasses.replace(SMALL, **wide, num_attention_heads=8, initializer_range=0.05)
        source = tmp_path / "wide"
        save(source, Decoder(config, rngs=nnx.Rngs(0)), version=1, step=0)
    convert(source, tmp_path / "out", dtype="bfloat16", scheme=scheme, say=lambda text: None)
    # Its fused experts are no Linear layers, so it can only compute with them dequantised.
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        attn_implementation="eager",
        dtype=torch.bfloat16,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).float()
    ids = np.random.default_rng(1).integers(1, 96, (2, 20))
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()
    ours = load(tmp_path / "out", dtype=jnp.float32)(jnp.asarray(ids))
    np.testing.assert_allclose(ours, expected, atol=5e-5, rtol=0)


def test_tokenizer_files_travel_along(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (source / file).write_text(f"{file} of the tokenizer folder")
    save(tmp_path / "a", Decoder(SMALL, rngs=nnx.Rngs(0)), version=1, step=0, tokenizer_dir=source)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_text() == f"{file} of the tokenizer folder"
    load(tmp_path / "a")


# ---- bad input: one sentence, with the name and the remedy ----------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in several shards, as others publish them: without our manifest, which would notice every change."""
    save(tmp_path / "c", Decoder(SMALL, rngs=nnx.Rngs(0)), version=1, step=0, max_shard_bytes=30_000)
    (tmp_path / "c" / "north_manifest.json").unlink()
    return tmp_path / "c"


def refused(path, *words):
    with pytest.raises(CheckpointError) as error:
        load(path)
    sentence = str(error.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard_of(folder, name):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def test_missing_shard(folder):
    shard = shard_of(folder, NAME)
    shard.unlink()
    refused(folder, shard.name, "is not there", "fetch that file")


def test_index_naming_a_missing_file(folder):
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"][NAME] = "model-00099-of-00099.safetensors"
    index.write_text(json.dumps(raw))
    refused(folder, "model-00099-of-00099.safetensors", "is not there", "fetch")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(folder, keep):
    shard = shard_of(folder, NAME)
    shard.write_bytes(shard.read_bytes()[:keep])
    refused(folder, str(shard), "truncated or damaged", "fetch it again")


def test_wrong_shape(folder):
    edit(shard_of(folder, NAME), lambda tensors: tensors.update({NAME: tensors[NAME].T.copy()}))
    refused(folder, NAME, "[32, 16]", "[16, 32]", "config.json")


def test_missing_tensor(folder):
    edit(shard_of(folder, NAME), lambda tensors: tensors.pop(NAME))
    refused(folder, NAME, shard_of(folder, NAME).name, "lacks it")


def test_missing_tensor_in_a_single_file(tmp_path):
    save(tmp_path / "c", Decoder(SMALL, rngs=nnx.Rngs(0)), version=1, step=0)
    (tmp_path / "c" / "north_manifest.json").unlink()
    edit(tmp_path / "c" / "model.safetensors", lambda tensors: tensors.pop(NAME))
    refused(tmp_path / "c", NAME, "is missing", "fetch")


def test_left_over_tensor(folder):
    extra = {"lm_head.weight": np.ones((2, 2), np.float32)}
    edit(shard_of(folder, NAME), lambda tensors: tensors.update(extra))
    refused(folder, "lm_head.weight", "belongs to no parameter", "remove")


def test_left_over_tensor_in_a_single_file(tmp_path):
    save(tmp_path / "c", Decoder(SMALL, rngs=nnx.Rngs(0)), version=1, step=0)
    (tmp_path / "c" / "north_manifest.json").unlink()
    extra = {"lm_head.weight": np.ones((2, 2), np.float32)}
    edit(tmp_path / "c" / "model.safetensors", lambda tensors: tensors.update(extra))
    refused(tmp_path / "c", "lm_head.weight", "belongs to no parameter", "remove")


def test_dense_layer_read_as_experts_is_noticed(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * 5}
    (folder / "config.json").write_text(json.dumps(raw))
    refused(folder, "model.layers.0.mlp", "is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_unreadable_config(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, str(folder / "config.json"), "cannot be read", "fetch it again")


def test_unknown_config_key(folder):
    raw = json.loads((folder / "config.json").read_text()) | {"moe_router_bias": True}
    (folder / "config.json").write_text(json.dumps(raw))
    refused(folder, str(folder / "config.json"), "moe_router_bias", "not known")


def test_no_config_no_weights_no_folder(folder, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    for shard in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        shard.unlink()
    refused(folder, "holds neither")


def test_damaged_index_and_two_sets_of_weights(folder):
    save(folder.parent / "single", Decoder(SMALL, rngs=nnx.Rngs(0)), version=1, step=0)
    shutil.copy(folder.parent / "single" / "model.safetensors", folder)
    refused(folder, "holds both", "remove")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "no readable weight_map")


def test_a_full_disk_leaves_the_last_folder(tmp_path, monkeypatch):
    model = Decoder(SMALL, rngs=nnx.Rngs(0))
    save(tmp_path / "c", model, version=1, step=0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"checkpoint .*/c could not be written .*No space left.*free disk space"):
        save(tmp_path / "c", model, version=2, step=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_save_replaces_and_clears_what_a_killed_writer_left(tmp_path):
    model = Decoder(SMALL, rngs=nnx.Rngs(0))
    for leftover in (".c.partial", ".c.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_bytes(b"half")
    for version in (1, 2):
        save(tmp_path / "c", model, version=version, step=version)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert json.loads((tmp_path / "c" / "north_manifest.json").read_text())["weight_version"] == "2"
