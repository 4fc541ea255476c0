"""What each of the two processes of `test_processes.py` does: python two_processes.py FOLDER"""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from packed_rows import batch_of
from test_sharding import TINY

from north_jax.model import Decoder, blocks
from north_jax.parallel import make_mesh, processes
from north_jax.train.loss import SFT
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import init_state, make_train_step, shard_batch
from north_jax.weights import hf
from north_jax.weights.checkpoint import Checkpoints

# The first axis of a mesh lies over the processes.
MESHES = {
    "data-fsdp-expert": {"data": 2, "fsdp": 2, "expert": 2},
    "fsdp-context": {"fsdp": 2, "context": 4},
}
CONFIG = dataclasses.replace(TINY, num_hidden_layers=1 + blocks.FEWEST, layer_types=None)  # so that they are stacked
# A larger eps, or where a gradient is as good as 0 Adam would divide its rounding by itself.
OPTIMIZER = make_optimizer(make_schedule(3e-4, 100), eps=1e-5)


def begin(mesh, seed=0):
    return init_state(blocks.stack(Decoder(CONFIG, rngs=nnx.Rngs(seed))), OPTIMIZER, mesh)


def step(mesh):
    """(state, {"loss", "grad_norm", …}) after a step on eight packed rows."""
    state, metrics = make_train_step(SFT, OPTIMIZER, mesh)(begin(mesh), shard_batch(batch_of(8), mesh))
    return state, {name: float(value) for name, value in metrics.items()}


def arrays(state) -> dict[str, np.ndarray]:
    """Every array of a state by name, whole."""
    everywhere = NamedSharding(state.step.sharding.mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(lambda state: state, out_shardings=everywhere)(state))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def write(path: pathlib.Path, **named) -> None:
    if processes.first():
        np.savez(path, **named)


def main(folder: pathlib.Path) -> None:
    processes.join()
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    assert processes.from_first({"said": processes.first()}) == {"said": True}
    flags = [bool(processes.any_of_all(flag)) for flag in (False, jax.process_index() == 1, True)]
    assert flags == [False, True, True], flags

    for name, sizes in MESHES.items():
        mesh = make_mesh(**sizes)
        state, metrics = step(mesh)
        write(folder / f"{name}.npz", **arrays(state), **metrics)
        checkpoints = Checkpoints(folder / name)
        checkpoints.save(1, state, {"mesh": sizes})
        checkpoints.close()
        hf.save(folder / f"{name}.model", blocks.unstack(state.model()), version=1, step=1)

    # Written by one process in another mesh.
    checkpoints = Checkpoints(folder / "by one")
    number, state, extra = checkpoints.restore_latest(begin(make_mesh(fsdp=4, tensor=2), seed=1))
    assert (number, extra) == (7, {"by": "one"})
    checkpoints.close()
    write(folder / "read by two.npz", **arrays(state))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
