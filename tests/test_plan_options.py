"""Compiler options that plans have."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import stowax
from planned_models import QUICK, plan, spec, specs, step_of, train, weights
from stowax._hlo._program import read_program
from stowax._hlo._proto import Module
from stowax._survey._options import more_fast_memory

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

LAYERS, WIDTH, ROWS = 4, 1024, 8192
AGAIN = {"dot_general*": "recompute"}


@functools.cache
def target():
    return stowax.target("v5e-16")


def arguments():
    """Weights and rows, each spread over all chips."""
    mesh = target().mesh((target().device_count,), ("data",))

    def on(leaf, *axes):
        return leaf.update(sharding=target().sharding(*axes, mesh=mesh))

    halves = weights(LAYERS, WIDTH, dtype=jnp.bfloat16)
    params = {name: on(leaf, None, "data") for name, leaf in halves.items()}
    return params, on(spec(ROWS, WIDTH, dtype=jnp.bfloat16), "data")


def loops_of_products(compiled):
    """How often XLA's name for a product that became a loop stands in a program."""
    (module,) = compiled.hlo_module_protos()
    return module.count(b"windowed_dot_general")


@pytest.mark.slow
def test_products_stay_whole_under_a_plan():
    usual = target().compile(jax.jit(train), *arguments(), compiler_options=QUICK)
    assert loops_of_products(usual) > 0  # or else the option has lost its reason
    found = plan(train, *arguments(), target="v5e-16", pin=AGAIN)
    assert found.fits
    assert found.host_bytes == 0
    planned = target().compile(found.apply(train), *specs(found, *arguments()))
    assert loops_of_products(planned) == 0


def attention(x, w):
    query, key, value = (jnp.einsum("bsd,dhe->bshe", x, w[n]) for n in "qkv")
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores, -1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", weights, value)
    return x + jnp.einsum("bqhe,hed->bqd", mixed, w["out"]), None


@stowax.stow
def attention_loss(params, x):
    x, _ = jax.lax.scan(attention, x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def fusions_of_products(compiled):
    """Fusions of a program that have more than one product inside."""
    module = Module.FromString(compiled.hlo_module_protos()[0])
    computations = {c.id: c for c in module.computations}

    def products(computation):
        inside = (i for i in computation.instructions if i.opcode == "fusion")
        here = sum(i.opcode in ("dot", "convolution") for i in computation.instructions)
        return here + sum(map(products_of, inside))

    def products_of(fusion):
        return sum(products(computations[i]) for i in fusion.called_computation_ids)

    fusions = (
        i for c in module.computations for i in c.instructions if i.opcode == "fusion"
    )
    return [i.name for i in fusions if products_of(i) > 1]


@pytest.mark.slow
def test_products_are_not_fused_with_products_under_a_plan():
    one = stowax.target("v6e-1")
    heads = spec(2, 512, 4, 128, dtype=jnp.bfloat16)
    params = {
        **dict.fromkeys("qkv", heads),
        "out": spec(2, 4, 128, 512, dtype=heads.dtype),
    }
    args = params, spec(4, 512, 512, dtype=heads.dtype)
    step = step_of(attention_loss)
    again = jax.jit(step_of(jax.checkpoint(attention_loss)))
    assert fusions_of_products(one.compile(again, *args, compiler_options=QUICK))
    found = plan(step, *args, target="v6e-1", pin={"dot_general*": "recompute"})
    assert found.host_bytes == 0
    planned = one.compile(found.apply(step), *specs(found, *args))
    assert not fusions_of_products(planned)


@pytest.mark.slow
def test_what_the_user_tells_the_compiler_goes_first():
    by_itself = plan(train, *arguments(), target="v5e-16", pin=AGAIN)
    (name,) = (
        option for option in by_itself.program.compiler_options if "einsum" in option
    )
    mine = {name: "0"}
    found = plan(train, *arguments(), target="v5e-16", pin=AGAIN, compiler_options=mine)
    assert found.program.compiler_options == {
        **by_itself.program.compiler_options,
        **mine,
    }
    planned = target().compile(found.apply(train), *specs(found, *arguments()))
    assert loops_of_products(planned) > 0


@stowax.stow
def five_products(params, x):
    def layer(x, w):
        parts = [
            checkpoint_name(x @ part, f"part {k}") for k, part in enumerate(w["in"])
        ]
        return x + jnp.tanh(sum(jnp.sin(p) for p in parts)) @ w["out"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def most_under_way(program, direction):
    """The most copies of one direction under way at once in any of its loops."""
    copies = {t.start for t in program.transfers if t.direction == direction}
    most = 0
    for computation in program.computations.values():
        now = set()
        for instruction in computation.instructions:
            if instruction.name in copies:
                now.add(instruction.name)
            elif instruction.opcode.endswith("-done"):
                now -= set(instruction.operands)
            most = max(most, len(now))
    return most


@pytest.mark.slow
def test_a_gpu_has_more_than_two_copies_under_way():
    one = spec(WIDTH, WIDTH, dtype=jnp.bfloat16)
    params = {
        name: jax.tree.map(lambda s: spec(LAYERS, *s.shape, dtype=s.dtype), tree)
        for name, tree in {"in": [one] * 5, "out": one}.items()
    }
    args = params, spec(4 * ROWS, WIDTH, dtype=jnp.bfloat16)
    step = step_of(five_products)
    pin = {f"part {k}": "offload" for k in range(5)}
    found = plan(step, *args, pin=pin)
    assert found.host_bytes == 5 * LAYERS * 4 * ROWS * WIDTH * 2
    machine = stowax.target("h200")
    own = found.program.compiler_options
    limit = "xla_gpu_experimental_parallel_async_compute_limit"
    under_way = {}
    for name, options in {"own": own, "usual": own | {limit: "2"}}.items():
        usual = plan(step, *args, pin=pin, compiler_options=options)
        compiled = machine.compile(usual.apply(step), *specs(usual, *args))
        program = read_program(compiled.hlo_module_protos()[0])
        under_way[name] = most_under_way(program, "device-to-host")
    assert under_way["usual"] <= 2 < under_way["own"]


@pytest.mark.slow
def test_a_plan_that_needs_the_least_has_no_copies_to_spare():
    """What is under way takes memory."""
    found = plan(train, *(weights(), spec(1024, 256)), budget=1024)
    assert not found.fits
    assert found.host_bytes > 0
    assert "xla_gpu_experimental_parallel_async_compute_limit" not in (
        found.program.compiler_options
    )


def feed_forward(x, w, v):
    return jax.nn.gelu(x @ w) @ v


@pytest.mark.slow
def test_more_fast_memory_makes_products_faster_and_takes_no_device_memory():
    """What the fifth program has on a TPU (`_options`), on the products of a layer."""
    chip = stowax.target("v5p-8")
    sizes = ((8192, 2304), (2304, 9216), (9216, 2304))
    arrays = [spec(*size, dtype=jnp.bfloat16) for size in sizes]
    step = jax.jit(feed_forward)
    usual, roomy = (
        chip.compile(step, *arrays, compiler_options=options)
        for options in ({}, more_fast_memory(chip))
    )
    first, second = (
        stowax.inspect(program, target=chip).timeline for program in (usual, roomy)
    )
    assert second.step_seconds < 0.97 * first.step_seconds
    before, after = (program.memory_analysis() for program in (usual, roomy))
    assert after.temp_size_in_bytes <= before.temp_size_in_bytes
