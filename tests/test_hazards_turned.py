"""Stacks that are laid out anew between two loops, found; and loops that agree."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from compiled_programs import machine
from hazard_programs import context, hazards_of
from stowax._hazards._turned import turned_stacks
from stowax._hlo._program import read_program
from stowax._inspect._inspect import inspect
from stowax._jax_layouts import row_major
from stowax._records._program import Computation, Fill, Program
from test_stored_layout import WEIGHTS, arguments, attention
from traces import instruction

pytestmark = pytest.mark.usefixtures("usual_promotion")

MIB, GIB = 2**20, 2**30


def layers(layer):
    """Gradients of layers in a scan, which keeps what their backward pass reads."""

    def loss(params, x):
        x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]
        return x.astype(jnp.float32).mean()

    return jax.jit(jax.grad(loss))


def fixed(x, w):
    """The same layer, its scores in memory in the order of their axes."""
    softmax = jax.nn.softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "softmax", lambda scores: softmax(row_major(scores)))
        return attention(x, w)


def inspected(layer):
    there = machine("h200")
    return inspect(layers(layer), *there.specs(*arguments()), target=there)


@pytest.mark.slow
def test_scores_that_are_transposed_between_forward_and_backward_loop():
    found, clean = inspected(attention), inspected(fixed)
    (hazard,) = hazards_of(found, "turned-stack")
    assert "test_hazards_turned.py" in hazard.where
    assert f"the largest {WEIGHTS // MIB}.0 MiB of float32: written by" in hazard.cost
    assert "transpose" in hazard.instruction
    assert hazard.count > 1
    # Each byte is read and written, at 4.8 TB/s.
    assert hazard.seconds > 2 * WEIGHTS / 4.8e12
    assert "jax.experimental.layout.with_layout_constraint" in hazard.remedy
    small = hazards_of(clean, "turned-stack")  # queries, keys and values are left
    assert all(f"{WEIGHTS // MIB}.0 MiB" not in h.cost for h in small)
    saved = found.memory.device.temp - clean.memory.device.temp
    assert saved > WEIGHTS / 2  # another layer's working memory takes its place


@pytest.mark.slow
def test_layers_that_are_recomputed_keep_nothing_to_be_turned():
    assert inspected(jax.checkpoint(attention)).hazards == ()


# --- by hand: one stack between two loops -------------------------------------------


def turned(
    size, total, *, between="copy", reorders=True, slices=True, runs=1, **intent
):
    """The hazards where a loop's stack goes through `between` into a later loop."""
    item = lambda name, opcode, *operands, **fields: instruction(
        name, opcode, operands=operands, result_bytes=size, **fields
    )
    last = "between"
    parts = [item(last, between, "stack", reorders=reorders)]
    if between.endswith("-start"):
        last = "done"
        parts.append(item(last, "copy-done", "between"))
    body = (item("write", "fusion"), item("root", "tuple", "write"))
    entry = (
        item("x", "parameter"),
        item("begin", "tuple", "x"),
        item("forward", "while", "begin", called=("body",), trips=4),
        item("stack", "get-tuple-element", "forward", tuple_index=0),
        *parts,
        item("view", "bitcast", last),
        item("given", "tuple", "view"),
        item("backward", "while", "given", called=("body",), trips=4),
    )
    lists = {"entry": (entry, runs), "body": (body, 4 * runs)}
    program = Program(
        name="step",
        entry="entry",
        computations={
            name: Computation(
                name=name, instructions=items, execution_thread="", executions=times
            )
            for name, (items, times) in lists.items()
        },
        transfers=(),
        uncounted_loops=(),
        fills=(Fill(name="write", bytes=size),) if slices else (),
    )
    seen = context("clean_policy", "h200")
    device = dataclasses.replace(
        seen.memory.device, argument=0, output=0, alias=0, temp=total
    )
    return list(
        turned_stacks(
            seen._replace(
                program=program,
                memory=dataclasses.replace(seen.memory, device=device),
                intent=dataclasses.replace(seen.intent, **intent),
            )
        )
    )


@pytest.mark.parametrize("between", ["copy", "fusion", "copy-start"])
def test_the_chain_between_two_loops(between):
    (hazard,) = turned(4 * MIB, 100 * MIB, between=between)
    assert (hazard.kind, hazard.instruction, hazard.where) == (
        "turned-stack",
        "between",
        "write",
    )
    assert hazard.cost.startswith("4.00 MiB of bfloat16: written by one loop, laid out")
    assert hazard.count == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"reorders": False},  # it computes, or copies as it is
        {"slices": False},  # the loop carries the array, and stacks nothing
        {"runs": 2},  # within another loop
        {"planned": True},  # the plan has weighed it
    ],
)
def test_what_is_no_turned_stack(changes):
    assert turned(4 * MIB, 100 * MIB, **changes) == []


@pytest.mark.parametrize(
    ("size", "total", "found"),
    [
        (4 * MIB, 400 * MIB, 1),
        (4 * MIB, 401 * MIB, 0),
        (MIB - 1, 2 * MIB, 0),
        (GIB, 1000 * GIB, 1),
    ],
)
def test_small_stacks_are_not_worth_a_word(size, total, found):
    assert len(turned(size, total)) == found


# --- what only reorders -------------------------------------------------------------


def test_what_is_written_in_another_order_and_nothing_else():
    there = machine("h200")
    spec = jax.ShapeDtypeStruct((64, 128, 256), jnp.float32)

    def reordering(function):
        compiled = there.compile(jax.jit(function), *there.specs(spec))
        program = read_program(compiled.hlo_module_protos()[0])
        return [
            i for i in program.computations[program.entry].instructions if i.reorders
        ]

    assert len(reordering(lambda x: x.transpose(1, 2, 0))) == 1
    assert reordering(lambda x: jnp.sin(x.transpose(1, 2, 0))) == []
    assert reordering(lambda x: x.reshape(128, 64, 256)) == []
    assert reordering(lambda x: x) == []
