"""What is read from a compiled program's text is what the program was written to send."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from north_jax.parallel import make_mesh
from north_jax.parallel.collectives import Collective, collectives

MESH = make_mesh(fsdp=4, tensor=2)
WHOLE = 64 * 32 * 4


def compiled(function, spec=("fsdp", None)):
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec(*spec)))
    return collectives(jax.jit(function).lower(x).compile().as_text(), MESH)


def on_shards(function, out):
    return jax.shard_map(
        function, mesh=MESH, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec(*out), check_vma=False
    )


CASES = {
    "all-gather": (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), (None,), WHOLE * 3 // 4),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True), ("fsdp",), WHOLE // 4 * 3 // 4),
    "all-reduce": (lambda x: jax.lax.psum(x, "fsdp"), (None,), 2 * WHOLE // 4 * 3 // 4),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True), (None, "fsdp"), WHOLE // 4 * 3 // 4),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        ("fsdp",),
        WHOLE // 4,
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_bytes_and_axes(kind):
    function, out, sent = CASES[kind]
    (found,) = compiled(on_shards(function, out))
    assert (found.kind, found.axes, found.bytes, found.count) == (kind, ("fsdp",), sent, 1)


def test_loops_count_their_rounds():
    def rounds(x):
        def inner(x, _):
            return jax.lax.psum(x, "tensor") * 0.5, None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=5)[0], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    (found,) = compiled(on_shards(rounds, ("fsdp",)))
    assert (found.kind, found.axes, found.count) == ("all-reduce", ("tensor",), 15)


@pytest.mark.parametrize(
    "chosen, axes", [("'a'", ("fsdp",)), ("'b'", ("tensor",)), ("'a':(1)2", ("fsdp",)), ("'a','b'", ("fsdp", "tensor"))]
)
def test_groups_by_the_names_of_the_compilers_mesh(chosen, axes):
    """As libtpu writes them, and loops whose rounds only their condition says."""
    text = f"""
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %all-gather.1 = f32[8]{{0}} all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {{{chosen}}}, dimensions={{0}}
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %constant.5 = s32[]{{:T(128)}} constant(12)
  ROOT %lt.3 = pred[]{{:T(512)}} compare(%i, %constant.5), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %while.1 = (s32[]{{:T(128)}}, f32[8]{{0}}) while(%tuple.1), condition=%condition, body=%body
}}
"""
    (found,) = collectives(text, MESH)
    group = {"'a'": 4, "'b'": 2, "'a':(1)2": 2, "'a','b'": 8}[chosen]
    assert found == Collective("all-gather", axes, 32 * (group - 1) // group, 12, (("f32", (8,)),))


def test_a_sum_of_which_each_keeps_a_slice_is_a_reduce_scatter():
    """As libtpu fuses it; the same outside of such a fusion is an all-reduce."""
    text = """
%all-reduce-scatter.1 (p: f32[16]) -> f32[2] {
  %all-reduce.1 = f32[16]{0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.1 = f32[2]{0} dynamic-slice(%all-reduce.1, %i), dynamic_slice_sizes={2}
}

ENTRY %main (p: f32[16]) -> f32[2] {
  %all-reduce.2 = f32[16]{0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %fusion.1 = f32[2]{0} fusion(%all-reduce.2), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    assert [(one.kind, one.bytes) for one in collectives(text, MESH)] == [
        ("all-reduce", 2 * 64 * 7 // 8),
        ("reduce-scatter", 64 * 7 // 8),
    ]


def test_a_branch_counts_as_often_as_it_is_taken():
    def layer(x, which):
        around = functools.partial(jax.lax.ppermute, axis_name="fsdp", perm=[(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.switch(which, [around, lambda x: jnp.sin(jax.lax.psum(x, "fsdp"))], x), None

    def loop(x):
        return jax.lax.scan(layer, x, jnp.asarray([1, 1, 0] * 4))[0]

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("fsdp")))
    text = jax.jit(on_shards(loop, ("fsdp",))).lower(x).compile().as_text()
    for shares, counts in (((), (12, 12)), ((Fraction(1, 3), Fraction(2, 3)), (4, 8))):
        found = {one.kind: one.count for one in collectives(text, MESH, shares)}
        assert (found["collective-permute"], found["all-reduce"]) == counts
