"""The config class: both spellings, the full-size model, and what it refuses."""

import importlib.util
import json
import pathlib

import pytest
from flax import nnx
from oracle import SEEDS

from north_jax.model import Decoder, ModelConfig, parameter_counts
from north_jax.weights.names import manifest

CASES = [pytest.param(seed, id=seed.name) for seed in SEEDS]
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def raw(**changes):
    return json.loads((SEEDS[0] / "config.released_style.json").read_text()) | changes


@pytest.mark.parametrize("seed", CASES)
def test_both_spellings_are_one_config(seed):
    saved = ModelConfig.from_hf(json.loads((seed / "config.json").read_text()))
    released = ModelConfig.from_hf(json.loads((seed / "config.released_style.json").read_text()))
    assert saved == released
    written = saved.to_hf()
    assert ModelConfig.from_hf(json.loads(json.dumps(written))) == saved
    for key in ("first_k_dense_replace", "mlp_layer_types", "rope_theta", "rope_parameters", "layer_types"):
        assert key in written
    # Nothing that either spelling says is lost or changed.
    for file in ("config.json", "config.released_style.json"):
        for key, value in json.loads((seed / file).read_text()).items():
            assert key == "transformers_version" or written[key] == value, key


def released_config() -> ModelConfig:
    spec = importlib.util.spec_from_file_location("north_mini_code", CONFIGS / "model" / "north_mini_code.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return ModelConfig.from_hf(module.get_config().to_dict())


def test_full_size_model_has_the_released_parameters():
    config = released_config()
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype="bfloat16"))
    assert parameter_counts(model) == (30_484_303_872, 2_768_343_040)
    tensors = manifest(model)
    assert len(tensors) == 18_730
    assert tensors["model.layers.48.mlp.experts.127.down_proj.weight"].shape == (2048, 768)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4096, 2048)


def test_layer_kinds_of_the_full_size_model():
    config = released_config()
    layers = range(49)
    assert [i for i in layers if not config.is_sliding(i)] == list(range(0, 49, 4))
    assert [i for i in layers if config.is_dense(i)] == [0]
    # Full attention has no positions, except in the dense prefix.
    assert [i for i in layers if not config.uses_rope(i)] == list(range(4, 49, 4))
    without_list = {key: value for key, value in config.to_hf().items() if key != "layer_types"}
    assert ModelConfig.from_hf(without_list) == config


def test_window_switch_adds_one_key():
    assert ModelConfig.from_hf(raw()).window == 8
    assert "window_inclusive" not in ModelConfig.from_hf(raw()).to_hf()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts is 1"),
        ({"use_qk_norm": True}, "use_qk_norm is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_parallel_block": False}, "use_parallel_block"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"position_embedding_type": "rope"}, "position_embedding_type"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta is 50000 but rope_parameters"),
        ({"mlp_layer_types": ["sparse"] * 5}, "first_k_dense_replace is 1 but mlp_layer_types"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "mlp_layer_types must be"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers but num_hidden_layers is 5"),
        ({"layer_types": ["full"] * 5}, "layer_types holds 'full'"),
        ({"num_attention_heads": 7}, "num_attention_heads 7"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"expert_selection_fn": "noisy"}, "'noisy'"),
        ({"hidden_size": None}, "hidden_size must be"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"moe_router_bias": True}, "'moe_router_bias' is not known"),
        ({"torch_dtype": "bfloat16"}, "dtype is 'float32' but torch_dtype"),
    ],
)
def test_refuses_by_name(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        ModelConfig.from_hf(raw(**changes))
    assert "\n" not in str(error.value)


def test_refuses_a_file_without_sizes():
    without = raw()
    del without["vocab_size"]
    with pytest.raises(ValueError, match="'vocab_size' is missing"):
        ModelConfig.from_hf(without)


def test_absent_keys_mean_what_the_file_format_says():
    bare = {
        key: raw()[key]
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = ModelConfig.from_hf(bare)
    assert (config.expert_selection_fn, config.norm_topk_prob) == ("softmax", True)
    assert (config.logit_scale, config.rope_theta, config.rms_norm_eps) == (0.0625, 10000.0, None)
    assert (config.first_k_dense_replace, config.num_key_value_heads) == (0, 8)
