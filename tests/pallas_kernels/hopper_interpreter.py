"""jax's interpreter of Mosaic GPU kernels, extended by what ours need: an operand in registers, late `wgmma`.

jax 0.10.2 interprets barriers, TMA copies and `wgmma` of two operands in shared memory. Added here: an operand in
registers, transposed views (multiplied, or stored to), parts of an accumulator, `pl.run_state` of accumulators,
`plgpu.load`, and copies past the end of an array. Every `wgmma` is carried out as late as its waits allow, so that a
buffer released too early is read after it was overwritten.
Private modules of jax: `interpreted` raises ImportError where they have moved.
"""

import collections
import contextlib
import functools
import threading
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False):
    """Pallas Mosaic GPU kernels traced inside run on the CPU; yields a function that tells whether races were found.

    Its `multiplied` lists the products of numbers in each wgmma.
    """
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import race_detection_state, thread_map, utils
    from jax._src.pallas.mosaic_gpu import core, primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, params
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import RaceDetectionState  # noqa: F401  (not in 0.11)
    from jax._src.state import discharge, indexing
    from jax._src.state import types as state_types

    class Interpreter(jaxpr_interpret.JaxprInterpreter):
        def call(self, function, result, *arguments):
            """An ordered call into Python: function(token, device, grid point, thread, *arguments)."""
            where = self.device_info.device_id, self.grid_point_coords, self.thread_id
            return callback.io_callback(function, result, *where, *arguments, ordered=True)

        def eqn(self, eqn, token, invals):
            """(token, outputs) of an equation, or None where jax's own interpreter is to be asked."""
            if eqn.primitive is core.layout_cast_p:
                return token, [invals[0]]
            if eqn.primitive is primitives.load_p:
                token, out = self._interpret_get_p(
                    eqn.replace(primitive=jaxpr_interpret.state_primitives.get_p), token, lambda: invals
                )
                return token, [out]
            if eqn.primitive is primitives.wgmma_ref_p:
                empty = jax.tree.structure([])
                trees = [eqn.params[f"{x}_transforms_tree"] or empty for x in ("acc", "a", "b")]
                transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), invals[3:])
                in_registers = not isinstance(eqn.invars[1].aval, state_types.AbstractRef)
                leaves, tree = jax.tree.flatten(transforms)
                issue = functools.partial(_issue, tree=tree, in_registers=in_registers)
                return self.call(issue, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, *invals[:3], *leaves), []
            if eqn.primitive is primitives.wgmma_wait_p:
                wait = functools.partial(_wait, allowed=int(eqn.invars[0].val))
                return self.call(wait, gpu_callbacks.TOKEN_SHAPE_DTYPE, token), []
            if eqn.primitive is primitives.wgmma_accumulator_deref_p:
                token = self.call(
                    functools.partial(_wait, allowed=eqn.params["wait_n"]), gpu_callbacks.TOKEN_SHAPE_DTYPE, token
                )
                result = gpu_callbacks.TOKEN_SHAPE_DTYPE, eqn.outvars[0].aval
                token, value = self.call(_read, result, token, invals[0])
                return token, [value]
            if eqn.primitive is primitives.wgmma_accumulator_store_p:
                return self.call(_write, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, *invals), [invals[1]]
            if eqn.primitive is discharge.run_state_p:
                return self.run_state(eqn, token, invals)
            return None

        def run_state(self, eqn, token, invals):
            keys, mine = [], []
            for outer, value in zip(eqn.invars, invals, strict=True):
                if isinstance(outer.aval, state_types.AbstractRef):
                    keys.append(value)
                    continue
                token, request = gpu_callbacks.call_make_allocation_request_array(
                    token=token, device_id=jnp.int32(self.device_info.device_id),
                    memory_space_id=gpu_callbacks.get_memory_space_idx(core.MemorySpace.REGS),
                    thread_id=jnp.int32(self.thread_id), initial_ref_count=1,
                )  # fmt: skip
                token, key = gpu_callbacks.call_allocate_buffer(
                    token=token, device_id=jnp.int32(self.device_info.device_id),
                    grid_point_coords=self.grid_point_coords, thread_id=self.thread_id,
                    allocation_request_as_array=request, value=value,
                )  # fmt: skip
                keys.append(key)
                mine.append(len(keys) - 1)
            token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
            token = self.call(functools.partial(_wait, allowed=0), gpu_callbacks.TOKEN_SHAPE_DTYPE, token)
            outs = list(invals)
            for i in mine:
                token, outs[i] = self.call(
                    _read, (gpu_callbacks.TOKEN_SHAPE_DTYPE, eqn.outvars[i].aval), token, keys[i]
                )
            return token, outs

        def interpret(self, jaxpr, token, *args):
            """As the parent's, which has no place to add a primitive: one equation at a time."""
            env = utils.JaxprEnv(vars=jaxpr.constvars + jaxpr.invars, values=args)
            for eqn in jaxpr.eqns:
                invals = env.read_many(eqn.invars)
                done = self.eqn(eqn, token, invals)
                if done is None:
                    alone = jaxpr.replace(
                        eqns=[eqn], constvars=[], invars=[v for v in eqn.invars if not hasattr(v, "val")],
                        outvars=eqn.outvars, debug_info=jaxpr.debug_info.with_unknown_names(),
                    )  # fmt: skip
                    values = [x for v, x in zip(eqn.invars, invals, strict=True) if not hasattr(v, "val")]
                    done = super().interpret(alone, token, *values)
                token, out = done
                env.write_many(eqn.outvars, out)
            return token, env.read_many(jaxpr.outvars)

    pending = collections.defaultdict(collections.deque)
    multiplied = []

    def _where(device, thread):
        return int(device), int(thread)

    def _operand(token, device, point, thread, key, transforms):
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        indexers = tuple(t for t in transforms if isinstance(t, indexing.NDIndexer))
        _, value = gpu_callbacks._get(token, device, point, thread, key, indexers)
        for t in transforms:
            if isinstance(t, state_types.TransposeTransform):
                value = np.transpose(value, t.permutation)
        return np.asarray(value, np.float32)

    def _issue(device, point, thread, token, acc, a, b, *leaves, tree, in_registers):
        acc_transforms, a_transforms, b_transforms = jax.tree.unflatten(tree, leaves)
        acc_transforms = tuple(acc_transforms or ())

        def product():
            left = np.asarray(a, np.float32)
            if not in_registers:
                left = _operand(token, device, point, thread, a, a_transforms)
            right = _operand(token, device, point, thread, b, b_transforms)
            _, before = gpu_callbacks._get(token, device, point, thread, acc, acc_transforms)
            after = jnp.asarray(before + left @ right)
            multiplied.append(left.size * right.shape[1])
            gpu_callbacks._swap(token, device, point, thread, acc, acc_transforms, after, None)

        pending[_where(device, thread)].append(product)
        return token

    def _wait(device, point, thread, token, *, allowed):
        queue = pending[_where(device, thread)]
        while allowed is not None and len(queue) > allowed:
            queue.popleft()()
        return token

    def _read(device, point, thread, token, key):
        _, value = gpu_callbacks._get(token, device, point, thread, key, ())
        return token, value

    def _write(device, point, thread, token, key, value):
        gpu_callbacks._swap(token, device, point, thread, key, (), value, None)
        return token

    swap = gpu_callbacks._swap

    def _swap_view(
        token, device_id, grid_point_coords, thread_id, allocation_key_as_array, transforms, val, mask, **how
    ):
        """A store, through a transposed view too."""
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        turned = bool(transforms) and isinstance(transforms[-1], state_types.TransposeTransform)
        if turned:
            assert mask is None and transforms[-1].permutation == (1, 0)
            transforms, val = transforms[:-1], np.transpose(val)
        where = token, device_id, grid_point_coords, thread_id, allocation_key_as_array
        token, old = swap(*where, transforms, val, mask, **how)
        return token, old.T if turned else old

    def _copy_out(*, token, device_id, grid_point_coords, thread_id, source_info, **copy):
        """A copy to global memory, of which only what lies inside the destination is written."""
        where = token, device_id, grid_point_coords, thread_id
        indexers = gpu_callbacks._remove_noop_transforms(copy["src_transforms"])
        _, value = gpu_callbacks._get(*where, copy["src_allocation_key_as_array"], indexers)
        memory = gpu_callbacks._get_shared_memory()
        thread = memory.get_global_thread_id(int(device_id), int(thread_id))
        key = gpu_callbacks.HostAllocationKey.from_array(copy["dst_allocation_key_as_array"])
        whole = utils.to_range(jax.tree.map(int, gpu_callbacks._remove_noop_transforms(copy["dst_transforms"])))
        inside, _, _ = memory.get_buffer_content(key, whole, thread)
        if inside is not None:
            lengths = iter(inside.shape)
            part = tuple(x if isinstance(x, int) else slice(x.start, x.start + next(lengths)) for x in whole)
            trimmed = np.asarray(value)[tuple(map(slice, inside.shape))]
            memory.store_buffer_content(key, part, trimmed, thread)
        return token

    programs, lock = {}, threading.Lock()

    def _run(jaxpr, consts, *args):
        """As jax's, which compiles the same program again for every thread of every block."""
        with lock:
            if jaxpr not in programs:
                program = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args) and None)
                programs[jaxpr] = program.lower(consts, *args).compile()
        programs[jaxpr](consts, *args)

    found = []  # jax forgets the races of a kernel when the next one starts.

    def _records(*args, **kwargs):
        found.append(race_detection_state.RaceDetectionState(*args, **kwargs))
        return found[-1]

    replaced = [
        (gpu_callbacks, "RaceDetectionState", _records),
        (jaxpr_interpret, "JaxprInterpreter", Interpreter),
        (thread_map, "_run_jaxpr", _run),
        (gpu_callbacks, "copy_smem_to_gmem", _copy_out),
        (gpu_callbacks, "_swap", _swap_view),
    ]
    options = params.InterpretGPUParams(
        detect_races=detect_races, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(unittest.mock.patch.object(module, name, value))
        gpu_callbacks.reset_gpu_interpret_mode_state()
        stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        stack.enter_context(params.force_gpu_interpret_mode(options))

        def verdict() -> bool:
            return any(races.races_found for races in found)

        verdict.multiplied = multiplied
        yield verdict
    assert not any(pending.values()), "a wgmma was never awaited"
