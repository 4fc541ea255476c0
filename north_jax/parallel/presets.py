"""Slices by name, and how the released model lies on each."""

from typing import NamedTuple


class Preset(NamedTuple):
    """`slice`: chip and topology as `tools/fit.py` and the compilers want them; `sizes` of the mesh's axes."""

    slice: str
    sizes: dict[str, int]


# Names as their makers use them. The number of a v5p is of TensorCores, two of which are one chip and one device to
# JAX; of a v6e it is chips, one device each. Of a TPU7x we count chips, each of them two devices. AxB is A GPUs.
PRESETS = {
    "v5p-64": Preset("v5p:2x4x4", {"fsdp": 8, "expert": 4}),
    "v5p-128": Preset("v5p:4x4x4", {"fsdp": 16, "expert": 4}),
    "v6e-256": Preset("v6e:16x16", {"fsdp": 8, "expert": 8, "context": 4}),
    "TPU7x-64": Preset("tpu7x:4x4x4", {"fsdp": 32, "expert": 4}),
    "8xH200": Preset("h200:1x1x8", {"fsdp": 2, "expert": 4}),
    "64xH200": Preset("h200:1x8x8", {"fsdp": 16, "expert": 4}),
}


def preset(name: str) -> Preset:
    """Raises ValueError for a name that is not in the table."""
    if name not in PRESETS:
        raise ValueError(
            f"mesh preset {name!r} is not known; choose one of {', '.join(PRESETS)}, or give the axes' sizes"
        )
    return PRESETS[name]
