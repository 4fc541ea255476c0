"""Folders into a mesh and back: every byte, at every number of devices; and what is read and held on the way."""

import importlib.util
import json
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import SEEDS
from safetensors.numpy import save_file
from same import same_bytes

from north_jax.model import Decoder
from north_jax.parallel import make_mesh, parameter_shardings
from north_jax.weights import CheckpointError, Folder, load, read_tensors, save, to_tensors

TREE = pathlib.Path(__file__).parents[2]
MESHES = [{}, {"fsdp": 2}, {"expert": 2, "tensor": 2}, {"fsdp": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 8}]


def mesh_of(sizes):
    count = int(np.prod(list(sizes.values())))
    return make_mesh(**sizes, devices=jax.devices()[:count])


def bench():
    spec = importlib.util.spec_from_file_location("bench", TREE / "tools" / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_every_byte_survives_at_every_number_of_devices(seed, sizes, tmp_path):
    mesh = mesh_of(sizes)
    model = load(seed, mesh=mesh)
    params = nnx.state(model, nnx.Param)
    wanted = parameter_shardings(mesh, params)
    assert jax.tree.map(lambda x, s: x.sharding == s, params, wanted) == jax.tree.map(lambda x: True, params)
    same_bytes(to_tensors(model), read_tensors(seed))
    save(tmp_path / "out", model, version=1, step=0)
    same_bytes(read_tensors(tmp_path / "out"), read_tensors(seed))


FULL_WIDTH = """
import json, os, resource, sys
import jax
from north_jax.parallel import make_mesh
from north_jax.weights import hf
source, target, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
mesh = make_mesh(**sizes)
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = hf.load(source, mesh=mesh)
arrays = [leaf for leaf in jax.tree.leaves(hf.nnx.state(model))]
held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
hf.save(target, model, version=0, step=0)
saved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"held": held, "load": loaded - before - held, "save": saved - before - held}))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two layers, the dense one and one of experts, with embedding and norms, all as wide as the release: 2.4 GB."""
    path = tmp_path_factory.mktemp("wide") / "slice"
    tools = bench()
    assert 2.3e9 < tools.write_slice(path, tools.slice_config(2)) < 2.5e9
    yield path
    shutil.rmtree(path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", [MESHES[n] for n in (0, 1, 2, 4)], ids=str)
def test_a_slice_at_full_width_survives_within_one_expert_stack_of_host_memory(wide, sizes, tmp_path):
    count = int(np.prod(list(sizes.values())))
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", FULL_WIDTH, wide, tmp_path / "out", json.dumps(sizes)],
        env=environment, cwd=TREE, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    memory = json.loads(run.stdout.splitlines()[-1])
    assert memory["held"] >= 2.3e9
    assert memory["load"] < 1.2e9 and memory["save"] < 1.2e9, memory
    with Folder(wide) as before, Folder(tmp_path / "out") as after:
        assert before.raw.keys() == after.raw.keys()
        assert before.manifest["checksums"] == after.manifest["checksums"]
        for name in before.raw:  # reading compares each with its checksum; the largest once more byte for byte
            a, b = before.read_raw(name), after.read_raw(name)
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert name.count("experts") or np.array_equal(a.view(np.uint16), b.view(np.uint16)), name
    shutil.rmtree(tmp_path / "out")  # pytest would keep its gigabytes for three runs


PROCESS = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from north_jax.parallel import make_mesh
from north_jax.weights import folder, hf
opened = []
class Watched(folder.Folder):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        opened.append(self)
hf.Folder = Watched
model = hf.load(sys.argv[3], mesh=make_mesh(**json.loads(sys.argv[5])))
hf.save(sys.argv[4], model, version=1, step=0)
print("READ", opened[0].bytes_read)
"""


@pytest.mark.parametrize("sizes", [{"expert": 8}, {"expert": 4, "tensor": 2}], ids=str)
def test_each_process_reads_only_what_its_devices_hold(sizes, tmp_path):
    source = SEEDS[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = [
        [sys.executable, "-c", PROCESS, f"127.0.0.1:{port}", str(rank), source, tmp_path / "out", json.dumps(sizes)]
        for rank in range(2)
    ]
    environment = {"JAX_PLATFORMS": "cpu", "PATH": ""}
    running = [
        subprocess.Popen(command, env=environment, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    read = [int(line.split()[1]) for out, _ in said for line in out.splitlines() if line.startswith("READ")]
    tensors = read_tensors(source)
    experts = sum(value.nbytes for name, value in tensors.items() if ".experts." in name)
    rest = sum(value.nbytes for value in tensors.values()) - experts
    for count in read:
        assert experts / 2 <= count <= experts / 2 + rest, (read, experts, rest)
    same_bytes(read_tensors(tmp_path / "out"), tensors)


def test_columns_are_read_alone_where_they_are_wider_than_a_page_of_the_disk(tmp_path):
    value = np.random.default_rng(0).standard_normal((6, 4096)).astype(np.float32)
    (tmp_path / "config.json").write_text((SEEDS[0] / "config.json").read_text())
    save_file({"x": value}, tmp_path / "model.safetensors")
    for columns, width in ((slice(1024, 3072), 2048), (slice(0, 512), 4096), (slice(None), 4096)):
        with Folder(tmp_path) as folder:
            np.testing.assert_array_equal(folder.read("x", slice(1, 5), columns), value[1:5, columns])
            assert folder.bytes_read == 4 * width * 4


# ---- repacks, types, and what is refused ----------------------------------------------------------------------------


def repack(seed, target, change):
    tensors = dict(read_tensors(seed))
    target.mkdir()
    (target / "config.json").write_text((seed / "config.json").read_text())
    save_file(change(tensors), target / "model.safetensors")
    return tensors


def stack(tensors, layer, matrix):
    names = [name for name in tensors if name.startswith(f"model.layers.{layer}.mlp.experts.") and matrix in name]
    pattern = f"model.layers.{layer}.mlp.experts.{{}}.{matrix}_proj.weight"
    return np.stack([tensors.pop(pattern.format(expert)) for expert in range(len(names))])


def as_mlx(tensors):
    for layer in range(1, 5):
        for matrix in ("gate", "up", "down"):
            tensors[f"model.layers.{layer}.mlp.switch_mlp.{matrix}_proj.weight"] = stack(tensors, layer, matrix)
    return {f"language_model.{name}": value for name, value in tensors.items()}


def as_in_memory(tensors):
    for layer in range(1, 5):
        gate, up = stack(tensors, layer, "gate"), stack(tensors, layer, "up")
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = stack(tensors, layer, "down")
    return tensors


@pytest.mark.parametrize("change", [as_mlx, as_in_memory])
@pytest.mark.parametrize("sizes", [{}, {"expert": 2, "tensor": 2, "fsdp": 2}], ids=str)
def test_repacks_load_as_the_same_model(change, sizes, tmp_path):
    repack(SEEDS[0], tmp_path / "repack", change)
    same_bytes(to_tensors(load(tmp_path / "repack", mesh=mesh_of(sizes))), read_tensors(SEEDS[0]))


def test_a_matrix_that_is_there_twice_is_refused(tmp_path):
    name = "model.layers.1.mlp.experts.0.up_proj.weight"

    def change(tensors):
        extra = tensors[name]
        return as_mlx(tensors) | {name: extra}

    repack(SEEDS[0], tmp_path / "repack", change)
    with pytest.raises(CheckpointError, match=rf"both hold {name}; remove one"):
        load(tmp_path / "repack")


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_a_parameter_stored_as_integers_is_refused(dtype, tmp_path):
    name = "model.layers.2.self_attn.q_proj.weight"
    repack(SEEDS[0], tmp_path / "repack", lambda tensors: tensors | {name: tensors[name].astype(dtype)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} is stored as {dtype}, .*take the config.json"):
        load(tmp_path / "repack")


def test_experts_of_several_types_are_refused_unless_a_type_is_asked_for(tmp_path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    repack(SEEDS[0], tmp_path / "repack", lambda tensors: tensors | {name: tensors[name].astype(np.float16)})
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.experts.0.up_proj.* several types \(float16, float32\)"):
        load(tmp_path / "repack")
    assert load(tmp_path / "repack", dtype=jnp.float32).layers[2].mlp.up_EDF.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_behind_a_switch(dtype, bad, tmp_path):
    name = "model.layers.3.mlp.experts.5.down_proj.weight"

    def change(tensors):
        tensors = {key: np.asarray(jnp.asarray(value, dtype)) for key, value in tensors.items()}
        tensors[name] = tensors[name].copy()
        tensors[name][3, 2] = bad
        return tensors

    repack(SEEDS[0], tmp_path / "repack", change)
    load(tmp_path / "repack")
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds NaN or infinity"):
        load(tmp_path / "repack", check_finite=True)


def test_a_split_axis_that_the_disk_does_not_have_is_read_too(tmp_path):
    """Over head_dim, which no rule splits today: the disk's rows hold heads and head_dim together."""
    from jax.sharding import NamedSharding, PartitionSpec

    from north_jax.weights import hf
    from north_jax.weights.names import manifest

    mesh = mesh_of({"tensor": 2})
    with Folder(SEEDS[0]) as folder:
        model = nnx.eval_shape(lambda: Decoder(folder.config, rngs=nnx.Rngs(0)))
        entries = manifest(model)
        name = "model.layers.0.self_attn.q_proj.weight"
        shape = model.layers[0].attention.q_DHK.shape
        split = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        blocks = hf._blocks(shape, np.dtype(np.float32), split)
        hf._read_into(blocks, entries, folder.read, shape, name)
        whole = np.asarray(load(SEEDS[0]).layers[0].attention.q_DHK[...])
        np.testing.assert_array_equal(np.asarray(hf._assemble(shape, split, blocks)), whole)
