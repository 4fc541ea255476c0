"""Several processes as one run: how they find one another, wait for one another, and agree.

All of them take every train step, in the same order. The first one alone plays rollouts, talks to the terminal and
writes files, but for checkpoints and exports, to which each brings its part.
"""

import functools
import itertools
import os
import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_YEAR_MS = 365 * 24 * 3600 * 1000
_meetings = itertools.count()


def join() -> None:
    """Makes this process one of a run of several; to be called before anything asks for a device.

    JAX finds the others by itself on TPU pods (GKE or TPU VMs), under Slurm and under Open MPI. Elsewhere the
    environment says it: JAX_COORDINATOR_ADDRESS, the HOST:PORT at which the first process can be reached by all,
    JAX_NUM_PROCESSES, and JAX_PROCESS_ID from 0. Raises ValueError, one sentence, where neither does.
    """
    # All end together: who has to wait at the end waits for one that failed.
    how: dict[str, Any] = {"shutdown_timeout_seconds": 15}
    given = [name for name in VARIABLES if os.environ.get(name)]
    if len(given) == 3:
        how |= _from_environment() | {"cluster_detection_method": "deactivate"}
    elif set(given) - {VARIABLES[0]}:
        raise ValueError(
            f"--distributed: {' and '.join(given)} set without {' and '.join(sorted(set(VARIABLES) - set(given)))}; "
            "set all three, or none where JAX finds the processes by itself"
        )
    # Signals are for `north_jax.train.interrupt`, not for a service that would swallow them.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**how)
    except ValueError as error:
        raise ValueError(
            f"--distributed: JAX finds no cluster here (TPU pod, Slurm, Open MPI): {error} Set {', '.join(VARIABLES)} "
            "on every process, or leave --distributed out"
        ) from error


def _from_environment() -> dict[str, Any]:
    address, count, own = (os.environ[name] for name in VARIABLES)
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS is {address!r}; it must be HOST:PORT of the first process")
    if not (count.isdigit() and own.isdigit() and int(own) < int(count)):
        raise ValueError(f"JAX_PROCESS_ID is {own!r} of JAX_NUM_PROCESSES {count!r}; ids go from 0 to the count less 1")
    return {"coordinator_address": address, "num_processes": int(count), "process_id": int(own)}


def first() -> bool:
    """Whether this process is the first one, which writes."""
    return jax.process_index() == 0


def meet() -> None:
    """Waits until all processes are here, however long that takes: no device is held by it."""
    if jax.process_count() == 1:
        return
    import orbax.checkpoint as ocp  # takes a second

    ocp.multihost.get_barrier_sync_fn()(key=f"north_jax {next(_meetings)}", timeout_ms=_YEAR_MS)


def from_first(value: Any) -> Any:
    """What the first process passes, on all of them; they wait for it however long that takes."""
    meet()
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8) if first() else None
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data) if first() else 0)))
    sent = multihost_utils.broadcast_one_to_all(data if first() else np.zeros(size, np.uint8))
    return value if first() else pickle.loads(np.asarray(sent).tobytes())


def any_of_all(flag: bool) -> jax.Array:
    """Whether any process passed True, as an array that may not be there yet; all processes call this."""
    sharding, either = _any_program()
    own = np.full(jax.local_device_count(), flag)
    return either(jax.make_array_from_process_local_data(sharding, own, (jax.device_count(),)))


@functools.cache
def _any_program():
    mesh = Mesh(jax.devices(), "device")
    everywhere = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("device")), jax.jit(jax.numpy.any, out_shardings=everywhere)


def on_host(array: jax.Array) -> np.ndarray:
    """The whole array, wherever its parts are; all processes call this."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
