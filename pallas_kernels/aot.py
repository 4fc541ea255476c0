"""Compiling for chips that are not here, with their real compilers: libtpu for TPUs, jax's CUDA plugin for Hopper.

Both come with `pip install north_jax[aot]` and need no hardware. What compiles here is known to compile there and to
fit its VMEM or shared memory; nothing is known about its time.
"""

import functools
import os
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chips import CHIPS

# Read by libtpu when it is first loaded: no metadata server is asked, several processes may compile at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Sizes from NVIDIA's H100 and H200 data sheets and CUDA's programming guide (compute capability 9.0).
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA" runtime_version {{ major: 13 }} dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@functools.cache
def devices(chip: str, topology: str | None = None) -> tuple[jax.Device, ...]:
    """The devices of a topology of a chip, of its smallest by default: "v5p:4x4x4", or partitions x hosts x GPUs.

    Errors: RuntimeError where its compiler is not installed.
    """
    described = CHIPS[chip]
    topology = topology or described.topology
    if described.platform == "tpu":
        options = {"topology_name": topology}
    else:
        config = _HOPPER.format(name=chip, bandwidth=int(described.bandwidth), memory=int(described.memory))
        options = {"topology_name": chip, "target_config": config, "topology": topology}
    try:
        return tuple(topologies.get_topology_desc(platform=described.platform, **options).devices)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"no compiler for {chip}: pip install 'north_jax[aot]' ({error})") from error


def slice_devices(slice_: str) -> tuple[jax.Device, ...]:
    """`devices` of a chip and its topology in one word: v5p:4x4x4, h200:1x8x8."""
    chip, _, topology = slice_.partition(":")
    return devices(chip, slice_ if CHIPS[chip].platform == "tpu" else topology)


def compile_for(chip: str, function: Callable, *arguments, **compiler_options) -> jax.stages.Compiled:
    """`function` compiled for one device of `chip`; arguments are arrays or ShapeDtypeStructs.

    Errors: the compiler's own, for example where a kernel's blocks exceed VMEM or shared memory.
    """
    mesh = Mesh(np.array(devices(chip)[:1]), ("device",))
    placed = NamedSharding(mesh, PartitionSpec())

    def described(x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*jax.tree.map(described, arguments))
        return lowered.compile(compiler_options=compiler_options or None)
