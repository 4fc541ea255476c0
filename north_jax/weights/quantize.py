"""Quantised release formats in the compressed-tensors layout that vLLM, SGLang and transformers read.

A scheme divides a matrix [out, in] into blocks that share one scale:

    scale = max|block| / limit        code = round(block / scale)        restored = code * scale

with codes in float8_e4m3fn (limit 448) or int4 (limit 7.5: sixteen codes cover -8 … 7). Rounding is to nearest, ties
to even, as compressed-tensors does; no calibration data is needed. One matrix is handled at a time, in stripes of rows.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_STRIPE = 128  # rows held in float32 at a time; a multiple of every scheme's block height


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One format. A scale is shared by `height` rows and `width` columns (0: the whole row); `weights` and
    `activations` are the QuantizationArgs of compressed-tensors."""

    name: str
    format: str
    limit: float
    height: int
    width: int
    weights: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    activations: Mapping[str, Any] | None = dataclasses.field(compare=False, repr=False)

    @property
    def packed(self) -> bool:
        """Whether eight int4 codes lie in one int32 of `weight_packed`, instead of one float8 each in `weight`."""
        return self.format == "pack-quantized"


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
# By name; compressed-tensors' own presets FP8_DYNAMIC, FP8_BLOCK and W4A16.
SCHEMES = {
    "fp8": Scheme(
        name="fp8",
        format="float-quantized",
        limit=448.0,
        height=1,
        width=0,
        weights={**_FLOAT8, "strategy": "channel", "dynamic": False},
        activations={**_FLOAT8, "strategy": "token", "dynamic": True},
    ),
    "fp8_block": Scheme(
        name="fp8_block",
        format="float-quantized",
        limit=448.0,
        height=128,
        width=128,
        weights={**_FLOAT8, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        activations={**_FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "int4": Scheme(
        name="int4",
        format="pack-quantized",
        limit=7.5,
        height=1,
        width=128,
        weights={**_INT4, "strategy": "group", "group_size": 128, "dynamic": False},
        activations=None,
    ),
}

# Module names that a release leaves as they are. A pattern, not a name, for the router: older SGLang takes a plain name
# as a substring, and "mlp.gate" is one of "mlp.gate_proj". Both engines and compressed-tensors use `re.match`.
IGNORE = ("lm_head", r"re:.*\.mlp\.gate$")


def is_quantised(name: str) -> bool:
    """Whether a tensor on disk is one that a scheme quantises: the projections of attention, dense MLP and experts.

    Router (`mlp.gate.weight`), norms and embedding are not.
    """
    return name.endswith("_proj.weight")


def shapes(name: str, shape: Sequence[int], dtype: Any, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Names, shapes and types of what `quantise` returns for a matrix `name` of this shape and type.

    Raises ValueError naming the tensor when it is no `….weight` matrix of bfloat16 or float32, or when its inputs
    do not divide into the groups of int4.
    """
    dtype = np.dtype(dtype)
    if not name.endswith(".weight") or len(shape) != 2 or 0 in shape or dtype.name not in ("bfloat16", "float32"):
        raise ValueError(
            f"tensor {name} has shape {list(shape)} and type {dtype}, but only a matrix [out, in] named ….weight in"
            " bfloat16 or float32 has a quantised form; keep it as it is"
        )
    rows, columns = map(int, shape)
    width = scheme.width or columns
    # The weight's own type, bfloat16 in a release, is the one in which every reader keeps the very same scale: engines
    # hold int4 scales in the model's type and float8 scales in float32, transformers all of them in the model's type.
    # It is also the type that compressed-tensors restores the weight to.
    scale = ((-(-rows // scheme.height), -(-columns // width)), dtype)
    if not scheme.packed:
        return dict(zip(_names(name, scheme), [((rows, columns), _E4M3), scale], strict=True))
    if columns % width:
        raise ValueError(
            f"tensor {name} has {columns} inputs, which do not divide into groups of {width};"
            " keep it unquantised or take an fp8 scheme"
        )
    plan = [((rows, columns // 8), np.dtype(np.int32)), scale, ((2,), np.dtype(np.int64))]
    return dict(zip(_names(name, scheme), plan, strict=True))


def _names(name: str, scheme: Scheme) -> list[str]:
    """Codes first, then scales."""
    return [f"{name}_packed", f"{name}_scale", f"{name}_shape"] if scheme.packed else [name, f"{name}_scale"]


def quantise(name: str, value: np.ndarray, scheme: Scheme) -> dict[str, np.ndarray]:
    """The tensors on disk for one matrix [out, in]: `….weight` or `….weight_packed` and `….weight_shape`, and
    `….weight_scale` [ceil(out / height), ceil(in / width)] in the matrix's own type.

    Raises ValueError naming the tensor on NaN or infinity, and as `shapes` does.
    """
    tensors = {key: np.empty(*plan) for key, plan in shapes(name, value.shape, value.dtype, scheme).items()}
    codes, scales = list(tensors.values())[:2]
    for rows, scale_rows in _stripes(len(value), scheme):
        blocks = _blocks(value[rows], scheme)
        largest = np.abs(blocks).max(axis=3).max(axis=1)
        if not np.isfinite(largest).all():
            raise ValueError(f"tensor {name} holds NaN or infinity; find the step that made it before releasing it")
        scales[scale_rows] = _round_up(largest / np.float32(scheme.limit), value.dtype)
        blocks /= _spread(scales[scale_rows])
        scaled = _flat(blocks, *value[rows].shape)
        codes[rows] = _to_int4(scaled) if scheme.packed else _to_e4m3(scaled)
    if scheme.packed:
        tensors[f"{name}_shape"][:] = value.shape
    return tensors


def dequantise(tensors: Mapping[str, np.ndarray], scheme: Scheme, dtype: Any) -> np.ndarray:
    """The matrix [out, in] that the tensors of one weight stand for: code * scale in float32, rounded to `dtype`.

    Raises ValueError naming the tensor that is missing, left over or misshaped.
    """
    name = next((key.removesuffix("_scale") for key in tensors if key.endswith("_scale")), "….weight")
    names = _names(name, scheme)
    remedy = "take the config.json that belongs to the weights"
    if set(tensors) != set(names):
        raise ValueError(f"a matrix in {scheme.name} is {', '.join(names)}, not {', '.join(sorted(tensors))}; {remedy}")
    codes, scales = (tensors[key] for key in names[:2])
    shape = tuple(map(int, tensors[names[2]].ravel())) if scheme.packed else codes.shape
    for key, plan in shapes(name, shape, scales.dtype, scheme).items():
        found = (tensors[key].shape, tensors[key].dtype)
        if found != plan:
            raise ValueError(
                f"tensor {key} has shape {list(found[0])} and type {found[1]}, but {scheme.name} asks for"
                f" {list(plan[0])} and {plan[1]}; {remedy}"
            )
    table = _INT4_VALUES if scheme.packed else _E4M3_VALUES
    restored = np.empty(shape, dtype)
    for rows, scale_rows in _stripes(len(restored), scheme):
        values = np.take(table, codes[rows].view(np.uint8), axis=0)
        blocks = _blocks(values.reshape(-1, shape[1]), scheme)
        blocks *= _spread(scales[scale_rows])
        restored[rows] = _flat(blocks, *restored[rows].shape)
    return restored


def _stripes(rows: int, scheme: Scheme) -> Iterator[tuple[slice, slice]]:
    """The same stripe as a slice of the matrix's rows and of the scales' rows."""
    for start in range(0, rows, _STRIPE):
        stop = min(start + _STRIPE, rows)
        yield slice(start, stop), slice(start // scheme.height, -(-stop // scheme.height))


def _blocks(stripe: np.ndarray, scheme: Scheme) -> np.ndarray:
    """A float32 copy [rows / height, height, columns / width, width], filled up with zeros."""
    rows, columns = stripe.shape
    width = scheme.width or columns
    missing = (-rows % scheme.height, -columns % width)
    stripe = stripe.astype(np.float32, order="C")
    if any(missing):
        stripe = np.pad(stripe, [(0, missing[0]), (0, missing[1])])
    return stripe.reshape(-1, scheme.height, stripe.shape[1] // width, width)


def _flat(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)[:rows, :columns]


def _spread(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32)[:, None, :, None]


def _round_up(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Up, so that block / scale stays within the limit; and normal, so that no block divides by zero and no
    accelerator flushes a scale to zero."""
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    rounded = scale.astype(dtype)
    return np.where(rounded.astype(np.float32) < scale, np.nextafter(rounded, dtype.type(np.inf)), rounded)


def _to_e4m3(scaled: np.ndarray) -> np.ndarray:
    """`scaled.astype(float8_e4m3fn)` for |scaled| <= 448, three times as fast and without holding the GIL.

    Next to the power of two p <= |x|, codes lie p / 8 apart. Adding |x| to p * 2^20, whose float32 neighbours are just
    as far apart, lets the addition round; what it added to the bits is the number of eighths. Below 2^-6 the codes stay
    2^-9 apart. An exponent is worth 8 codes.
    """
    bits = scaled.view(np.uint32)
    exponent = np.maximum(bits & 0x7F800000, 121 << 23)
    anchor = exponent + (20 << 23)
    code = (np.abs(scaled) + anchor.view(np.float32)).view(np.uint32)
    code -= anchor
    code += exponent >> 20
    code -= 121 * 8
    code |= (bits >> 24) & 0x80
    return code.astype(np.uint8).view(_E4M3)


def _to_int4(scaled: np.ndarray) -> np.ndarray:
    """Eight codes to an int32, the first in the lowest bits, each with 8 added."""
    codes = np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8)
    pairs = codes.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8).view("<i4")


_BYTES = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = _BYTES.view(_E4M3).astype(np.float32)
_INT4_VALUES = np.stack([_BYTES & 15, _BYTES >> 4], axis=1).astype(np.float32) - 8


def config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. `ignore` names modules that stay as they are: names or `re:` patterns
    of whole module names, usually IGNORE."""
    # "Linear" is the target that vLLM and SGLang extend to their fused experts; older ones look for that very word.
    group = {
        "targets": ["Linear"],
        "weights": dict(scheme.weights),
        "input_activations": scheme.activations and dict(scheme.activations),
        "format": scheme.format,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme.format,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


# Of a config, these do not change how weights are read: which modules (the tensors show it) and how scales were found.
_INERT = {"config_groups", "ignore", "version", "global_compression_ratio"}
_INERT_ARGUMENTS = {"observer", "observer_kwargs", "zp_dtype"}


def scheme_of(quantization_config: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`. Raises ValueError naming the first key in which it is none of SCHEMES."""
    found = _flatten(quantization_config)
    nearest = (found.get("format"), found.get("weights.strategy"))
    scheme = next((s for s in SCHEMES.values() if (s.format, s.weights["strategy"]) == nearest), SCHEMES["fp8"])
    expected = _flatten(config(scheme, ()))
    for key in {**found, **expected}:
        if (found.get(key) or None) != (expected.get(key) or None):
            raise ValueError(
                f"quantization_config has {key} = {found.get(key)!r}, which none of the schemes {', '.join(SCHEMES)}"
                " has; start from the unquantised checkpoint"
            )
    return scheme


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides how weights are read, as one flat table; None, False and empty stand for absent."""
    flat = {key: value for key, value in raw.items() if key not in _INERT}
    groups = raw.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    flat["number of config_groups"] = len(groups)
    for group in groups.values():
        parts = dict(group) if isinstance(group, Mapping) else {"preset": group}
        parts.pop("targets", None)
        flat["format of config_groups"] = parts.pop("format", None) or raw.get("format")
        for part, value in parts.items():
            if part in ("weights", "input_activations") and isinstance(value, Mapping):
                flat |= {f"{part}.{key}": given for key, given in value.items() if key not in _INERT_ARGUMENTS}
            else:
                flat[part] = value
    return flat


def error(original: np.ndarray, restored: np.ndarray) -> dict[str, float]:
    """How far `restored` is from `original`, summed in float64: `relative` = ||original - restored|| / ||original||
    (Frobenius), `max_abs`, and `sqnr_db` = -20 log10(relative), infinite when nothing was lost."""
    if original.shape != restored.shape:
        raise ValueError(f"shapes {list(original.shape)} and {list(restored.shape)} differ; give the same matrix twice")
    signal = noise = largest = 0.0
    for start in range(0, len(original), _STRIPE):
        expected = original[start : start + _STRIPE].astype(np.float64)
        difference = np.abs(expected - restored[start : start + _STRIPE].astype(np.float64))
        signal += float(np.square(expected).sum())
        noise += float(np.square(difference).sum())
        largest = max(largest, float(difference.max()))
    if noise == 0:
        return {"relative": 0.0, "max_abs": 0.0, "sqnr_db": math.inf}
    relative = math.sqrt(noise / signal) if signal else math.inf
    return {"relative": relative, "max_abs": largest, "sqnr_db": -20 * math.log10(relative)}
