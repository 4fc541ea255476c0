"""Quantised formats: the error each promises, agreement with compressed-tensors' own code, and what is refused."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_named_modules

from north_jax.weights.quantize import (
    IGNORE,
    SCHEMES,
    _to_e4m3,
    config,
    dequantise,
    error,
    is_quantised,
    quantise,
    scheme_of,
    shapes,
)

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
NAME = "model.layers.1.mlp.experts.0.up_proj.weight"
DISK = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "model.layers.1.mlp.gate.weight",
    *(f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")),
]
PROJECTIONS = [name for name in DISK if "_proj" in name]
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def matrix(shape=(200, 384), dtype=BF16, seed=0):
    """Weights with outliers, a row and a block of zeros, a tiny row and, from float32, subnormals."""
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(shape, np.float32) * np.exp(2 * rng.standard_normal((shape[0], 1), np.float32))
    value *= np.where(rng.random(shape) < 0.01, 50, 1).astype(np.float32)
    value[3] = 0
    value[:128, 128:256] = 0
    value[7] *= np.float32(1e-36)
    value[9] = np.float32(1e-41)
    return value.astype(dtype)


def spread(scale, scheme, shape):
    """One scale per element."""
    scale = np.repeat(scale.astype(np.float32), scheme.height, axis=0)
    return np.repeat(scale, scheme.width or shape[1], axis=1)[: shape[0], : shape[1]]


def to_torch(array):
    if array.dtype == E4M3:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def reader(scheme):
    """compressed-tensors' compressor of the scheme's format, and its own form of the scheme."""
    parsed = QuantizationConfig.model_validate(config(scheme, IGNORE))
    return BaseCompressor.get_value_from_registry(parsed.format), parsed.config_groups["group_0"]


def local(tensors):
    return {f"weight{name.removeprefix(NAME)}": to_torch(value) for name, value in tensors.items()}


def shape_for(scheme):
    """Divides into no block, where the format allows that, and into more than one stripe of rows."""
    return (200, 384) if scheme.packed else (200, 300)


@schemes
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_error_is_that_of_the_format(scheme, dtype):
    value = matrix(shape_for(scheme), dtype)
    tensors = quantise(NAME, value, scheme)
    restored = dequantise(tensors, scheme, np.float32)
    x = value.astype(np.float64)
    step = spread(tensors[f"{NAME}_scale"], scheme, value.shape).astype(np.float64)
    # e4m3 has four significant bits, so half a unit of the last is 2^-4 of the value at most, down to 2^-6; below that,
    # codes are 2^-9 apart. A code of int4 is a step from the next, and the largest value lies half a step past code 7.
    bound = step / 2 if scheme.packed else np.maximum(np.abs(x) * 2.0**-4, step * 2.0**-10)
    difference = np.abs(restored - x)
    float32_rounding = bound * 2.0**-18 + 2.0**-149
    assert (difference <= bound + float32_rounding).all()
    assert (difference / bound).max() > 0.9  # the bound is not an idle one
    assert not restored[3].any() and not restored[:128, 128:256].any()


@schemes
def test_scale_is_the_least_of_its_type_that_holds_the_block(scheme):
    value = matrix(shape_for(scheme))
    scale = quantise(NAME, value, scheme)[f"{NAME}_scale"]
    assert scale.dtype == BF16 and (scale.astype(np.float32) >= np.finfo(np.float32).tiny).all()
    ratio = np.abs(value.astype(np.float64)) / spread(scale, scheme, value.shape)
    assert ratio.max() <= scheme.limit
    below = np.nextafter(scale, BF16.type(0))
    large = scale > np.finfo(np.float32).tiny
    ratio = np.abs(value.astype(np.float64)) / np.maximum(spread(below, scheme, value.shape), 1e-45)
    width = scheme.width or value.shape[1]
    for row, column in np.argwhere(large):
        block = ratio[row * scheme.height : (row + 1) * scheme.height, column * width : (column + 1) * width]
        assert block.max() > scheme.limit


@schemes
def test_scales_are_those_of_compressed_tensors(scheme):
    value = matrix((256, 384), np.float32)[10:138]
    _, parsed = reader(scheme)
    width = scheme.width or value.shape[1]
    blocks = value.reshape(-1, scheme.height, value.shape[1] // width, width)
    least, largest = (torch.from_numpy(find(blocks, axis=(1, 3))) for find in (np.min, np.max))
    theirs, _ = calculate_qparams(least, largest, parsed.weights)
    ours = to_torch(quantise(NAME, value, scheme)[f"{NAME}_scale"])
    assert torch.equal(torch.where(largest > least, theirs, ours), ours)  # for a block of zeros any scale will do


@schemes
def test_shapes_are_those_of_the_data(scheme):
    for dtype in (BF16, np.dtype(np.float32)):
        value = matrix(shape_for(scheme), dtype)
        tensors = quantise(NAME, value, scheme)
        assert {key: (v.shape, v.dtype) for key, v in tensors.items()} == shapes(NAME, value.shape, dtype, scheme)
        assert dequantise(tensors, scheme, dtype).dtype == dtype


def test_shapes_on_disk():
    plan = {name: shapes(NAME, (768, 2048), BF16, scheme) for name, scheme in SCHEMES.items()}
    assert plan["fp8"] == {NAME: ((768, 2048), E4M3), f"{NAME}_scale": ((768, 1), BF16)}
    assert plan["fp8_block"] == {NAME: ((768, 2048), E4M3), f"{NAME}_scale": ((6, 16), BF16)}
    assert plan["int4"] == {
        f"{NAME}_packed": ((768, 256), np.int32),
        f"{NAME}_scale": ((768, 16), BF16),
        f"{NAME}_shape": ((2,), np.int64),
    }
    assert shapes(NAME, (129, 257), BF16, SCHEMES["fp8_block"])[f"{NAME}_scale"][0] == (2, 3)


@schemes
def test_rows_are_independent_of_memory_layout(scheme):
    value = matrix((384, 256))
    expected = quantise(NAME, np.ascontiguousarray(value.T), scheme)
    for name, tensor in quantise(NAME, value.T, scheme).items():
        assert tensor.tobytes() == expected[name].tobytes()
        assert tensor.flags.c_contiguous


def test_float8_rounding_is_that_of_ml_dtypes():
    codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    between = (codes[1:] + codes[:-1]) / 2
    edges = np.concatenate([codes, between, *(np.nextafter(between, np.float32(end)) for end in (0, 448))])
    rng = np.random.default_rng(0)
    values = rng.standard_normal(100_000, np.float32) * np.exp2(rng.integers(-20, 7, 100_000)).astype(np.float32)
    values = np.concatenate([edges, -edges, np.clip(values, -448, 448)])
    assert _to_e4m3(values[None])[0].tobytes() == values.astype(E4M3).tobytes()


@schemes
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_compressed_tensors_restores_the_same_weights(scheme, dtype):
    tensors = quantise(NAME, matrix(shape_for(scheme), dtype), scheme)
    compressor, parsed = reader(scheme)
    state = local(tensors)
    assert set(state) == set(compressor.compression_param_names(parsed))
    theirs = compressor.decompress(state, parsed)["weight"]
    ours = to_torch(dequantise(tensors, scheme, dtype))
    assert theirs.dtype == ours.dtype and torch.equal(theirs, ours)


@schemes
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_compressed_tensors_makes_the_same_codes_of_our_scales(scheme, dtype):
    value = matrix(shape_for(scheme), dtype)
    state = local(quantise(NAME, value, scheme))
    compressor, parsed = reader(scheme)
    # In float32: in bfloat16 they would round the quotient before they round it to a code.
    weight, scale = to_torch(value).float(), state["weight_scale"].float()
    theirs = compressor.compress({"weight": weight, "weight_scale": scale}, parsed)
    for name in set(state) - {"weight_scale"}:
        assert theirs[name].dtype == state[name].dtype
        assert torch.equal(theirs[name].view(torch.uint8), state[name].view(torch.uint8)), name


@schemes
def test_compressed_tensors_quantises_the_projections_only(scheme):
    model = torch.nn.Module()
    for name in [*DISK, "lm_head.weight"]:
        *parents, leaf = name.removesuffix(".weight").split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        # A router may be a Linear, as it is in both engines.
        kind = torch.nn.Linear(1, 1, device="meta") if "norm" not in leaf else torch.nn.LayerNorm(1, device="meta")
        module.add_module(leaf, torch.nn.Embedding(1, 1, device="meta") if "embed" in leaf else kind)
    parsed = QuantizationConfig.model_validate(config(scheme, IGNORE))
    (group,) = parsed.config_groups.values()
    matched = {f"{name}.weight" for name, _ in match_named_modules(model, group.targets, parsed.ignore)}
    assert matched == set(PROJECTIONS) == {name for name in DISK if is_quantised(name)}


@pytest.mark.parametrize(("name", "preset"), [("fp8", "FP8_DYNAMIC"), ("fp8_block", "FP8_BLOCK"), ("int4", "W4A16")])
def test_config_is_the_preset_and_is_read_back(name, preset):
    scheme = SCHEMES[name]
    ours = config(scheme, IGNORE)
    assert json.loads(json.dumps(ours)) == ours
    assert scheme_of(ours) == scheme
    parsed = QuantizationConfig.model_validate(ours)
    group = parsed.config_groups["group_0"]
    assert infer_module_format(torch.nn.Linear, group) == group.format == parsed.format
    assert group.model_copy(update={"format": None}) == preset_name_to_scheme(preset, ["Linear"])
    # What compressed-tensors writes for the scheme, and what files made with its older versions say besides.
    written = json.loads(parsed.model_dump_json())
    assert written != ours
    written |= {"version": "0.9.4", "sparsity_config": {}, "transform_config": {}}
    written["config_groups"]["group_0"].pop("format")
    written["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]  # which tensors are quantised, tensors show
    written["config_groups"]["group_0"]["weights"] |= {"observer": "minmax", "observer_kwargs": {}, "actorder": None}
    assert scheme_of(written) == scheme


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("fp8", "quant_method", "gptq", "quant_method = 'gptq'"),
        ("fp8", "format", "nvfp4-pack-quantized", "format = 'nvfp4-pack-quantized'"),
        ("fp8", "quantization_status", "frozen", "quantization_status = 'frozen'"),
        ("fp8", "kv_cache_scheme", {"num_bits": 8, "type": "float"}, "kv_cache_scheme"),
        ("fp8", "anything_new", 1, "anything_new = 1"),
        ("fp8", "format", ["float-quantized"], "format = "),
        ("fp8", "config_groups", ["Linear"], "number of config_groups = 0"),
        ("fp8", "config_groups.group_0.weights", [8], r"weights = \[8\]"),
        ("fp8", "config_groups.group_1", {}, "number of config_groups = 2"),
        ("fp8", "config_groups.group_0", ["Linear"], r"preset = \['Linear'\]"),
        ("fp8", "config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
        ("fp8", "config_groups.group_0.weights.strategy", "tensor", "weights.strategy = 'tensor'"),
        ("fp8", "config_groups.group_0.input_activations", None, "input_activations.num_bits = None"),
        ("fp8", "config_groups.group_0.input_activations.dynamic", False, "input_activations.dynamic = False"),
        (
            "fp8_block",
            "config_groups.group_0.weights.block_structure",
            [64, 64],
            r"weights.block_structure = \[64, 64\]",
        ),
        ("int4", "config_groups.group_0.weights.symmetric", False, "weights.symmetric = False"),
        ("int4", "config_groups.group_0.weights.group_size", 32, "weights.group_size = 32"),
        ("int4", "config_groups.group_0.weights.num_bits", 8, "weights.num_bits = 8"),
        ("int4", "config_groups.group_0.weights.actorder", "group", "weights.actorder = 'group'"),
        ("int4", "config_groups.group_0.format", "int-quantized", "format of config_groups = 'int-quantized'"),
    ],
)
def test_other_configs_are_refused_by_name(name, path, value, words):
    other = json.loads(json.dumps(config(SCHEMES[name], IGNORE)))
    *parents, key = path.split(".")
    place = other
    for parent in parents:
        place = place[parent]
    place[key] = value
    with pytest.raises(ValueError, match=f"^quantization_config has .*{words}.*; start from the unquantised"):
        scheme_of(other)


@schemes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_refused(scheme, bad):
    value = matrix()
    value[150, 200] = bad
    with pytest.raises(ValueError, match=f"tensor {re.escape(NAME)} holds NaN or infinity"):
        quantise(NAME, value, scheme)


def test_matrices_that_have_no_quantised_form_are_refused():
    with pytest.raises(ValueError, match="has 300 inputs, which do not divide into groups of 128; keep it"):
        shapes(NAME, (16, 300), BF16, SCHEMES["int4"])
    for shape, dtype in [((8,), BF16), ((2, 8, 8), BF16), ((0, 8), BF16), ((8, 8), np.float16), ((8, 8), np.int8)]:
        with pytest.raises(ValueError, match=r"has shape .* but only a matrix"):
            shapes(NAME, shape, dtype, SCHEMES["fp8"])
    with pytest.raises(ValueError, match=r"model.bias has shape .* named ….weight"):
        shapes("model.bias", (8, 8), BF16, SCHEMES["fp8"])


@schemes
def test_tensors_that_do_not_belong_together_are_refused(scheme):
    tensors = quantise(NAME, matrix((256, 256)), scheme)
    codes, scale = list(tensors)[:2]
    for other in ({codes: tensors[codes]}, {scale: tensors[scale]}, {**tensors, f"{NAME}_g_idx": np.zeros(256)}):
        with pytest.raises(ValueError, match=f"^a matrix in {scheme.name} is "):
            dequantise(other, scheme, BF16)
    for name in (codes, scale):
        with pytest.raises(ValueError, match=rf"^tensor {re.escape(NAME)}.* has shape .*; take the config.json"):
            dequantise({**tensors, name: tensors[name][:1]}, scheme, BF16)
    with pytest.raises(ValueError, match=rf"tensor {re.escape(codes)} has shape .* type float32, but"):
        dequantise({**tensors, codes: tensors[codes].astype(np.float32)}, scheme, BF16)


def test_error():
    original = np.full((300, 4), 2, BF16)
    restored = original.copy()
    restored[299, 3] = 0.5
    ratio = 1.5 / math.sqrt(1200 * 4)
    found = error(original, restored)
    assert found == pytest.approx({"relative": ratio, "max_abs": 1.5, "sqnr_db": -20 * math.log10(ratio)})
    assert error(original, original) == {"relative": 0, "max_abs": 0, "sqnr_db": math.inf}
    assert error(0 * original, restored)["relative"] == math.inf
    with pytest.raises(ValueError, match=r"\[300, 4\] and \[4, 300\] differ"):
        error(original, original.T)


def test_normal_weights_lose_what_the_formats_are_known_for():
    value = (np.random.default_rng(1).standard_normal((512, 1024), np.float32) * 0.02).astype(BF16)
    found = {name: error(value, dequantise(quantise(NAME, value, s), s, BF16)) for name, s in SCHEMES.items()}
    # e4m3: a step of 2^-3 p, uniform error 2^-3 p / sqrt(12), over the binades; int4: a step of max / 7.5, with the
    # largest of 128 normal values near 2.8 sigma, so 20 log10(7.5 sqrt(12) / 2.8) dB.
    assert 31 < found["fp8"]["sqnr_db"] < 32 and 31 < found["fp8_block"]["sqnr_db"] < 32
    assert 18.5 < found["int4"]["sqnr_db"] < 19.7
