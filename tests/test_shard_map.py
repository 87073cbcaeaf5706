"""Steps in `jax.shard_map`: a device's part of the layers is planned as a program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stowax

LAYERS, WIDTH, ROWS, WORDS = 4, 128, 512, 256
MANY = 8192, 4096
MANY_WORDS = 512, 16384
RECOMPUTE = {"activation": "recompute"}
TX = optax.adam(1e-2)


@dataclasses.dataclass(frozen=True)
class Case:
    """How a step is spread: which way, which layers, who takes the gradient."""

    way: str = "data"
    looped: bool = False
    around: str = "step"
    checked: bool = True


def specs_of(case):
    specs = {"embed": P(), "up": P(), "down": P(), "head": P()}
    if case.way == "tensor":
        return specs | {"up": P(None, None, "model"), "down": P(None, "model")}
    if case.way == "weights":  # FSDP: every layer gathers its own
        return specs | {"up": P(None, "data"), "down": P(None, "data")}
    return specs


def mesh_of(case):
    two = case.way != "data"
    shape, names = ((2, 4), ("data", "model")) if two else ((8,), ("data",))
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def layer_of(case):
    def layer(x, w):
        up, down = w["up"], w["down"]
        if case.way == "weights":
            gather = lambda a: jax.lax.all_gather(a, "data", axis=0, tiled=True)
            up, down = gather(up), gather(down)
        if case.way == "data":  # numbers of its own on every device
            key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("data"))
            x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)
        y = jax.nn.gelu(x @ up) @ down
        return x + (jax.lax.psum(y, "model") if case.way == "tensor" else y), None

    return layer


def loss_of(case):
    layer = layer_of(case)

    def loss(params, batch):
        x = params["embed"][batch["x"]]
        weights = {"up": params["up"], "down": params["down"]}
        if case.looped:
            for i in range(LAYERS):
                x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        else:
            x, _ = jax.lax.scan(layer, x, weights)
        logits = x @ params["head"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return each.mean()

    return loss


def step_of(case, mesh):
    loss, specs = loss_of(case), specs_of(case)
    moments = optax.ScaleByAdamState(count=P(), mu=specs, nu=specs)
    held = specs, (moments, optax.EmptyState())

    def updated(params, state, value, grads):
        updates, state = TX.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def local(held, batch):
        value, grads = jax.value_and_grad(loss)(held[0], batch)

        def mean(grad, spec):
            # JAX adds up what is the same on all devices where it knows what is.
            if case.checked or spec != P():
                return grad / jax.lax.axis_size("data")
            return jax.lax.pmean(grad, mesh.axis_names)

        grads = {name: mean(grad, specs[name]) for name, grad in grads.items()}
        return updated(*held, jax.lax.pmean(value, "data"), grads)

    def around(held, batch):
        params, state = held
        part = jax.shard_map(
            lambda p, b: jax.lax.pmean(loss(p, b), "data"),
            mesh=mesh,
            in_specs=(specs, P("data")),
            out_specs=P(),
            check_vma=case.checked,
        )
        value, grads = jax.value_and_grad(part)(params, batch)
        return updated(params, state, value, grads)

    if case.around == "loss":
        return around
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(held, P("data")),
        out_specs=(held, P()),
        check_vma=case.checked,
    )


def arrays(case, mesh, sizes=(ROWS, WORDS)):
    rows, words = sizes
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {
        "embed": (words, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "head": (WIDTH, words),
    }
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    params = {
        n: put(jax.random.normal(key, shape) * shape[-2] ** -0.5, specs_of(case)[n])
        for key, (n, shape) in zip(keys, shapes.items(), strict=False)
    }
    state = jax.tree.map(lambda a: a if a.ndim else put(a, P()), TX.init(params))
    tokens = jax.random.randint(keys[5], (2, rows), 0, words)
    batch = dict(zip("xy", (put(t, P("data")) for t in tokens), strict=True))
    return (params, state), batch


def losses_of(step, held, batch):
    held, found = jax.tree.map(jnp.copy, held), []
    for _ in range(3):
        held, value = step(held, batch)
        found.append(float(value))
    return found, held


CASES = [
    Case(),
    Case(checked=False),
    Case(looped=True),
    Case(way="tensor"),
    Case(way="tensor", checked=False, looped=True),
    Case(way="weights"),
    Case(way="weights", checked=False),
    Case(around="loss"),
    Case(around="loss", checked=False, looped=True),
    Case(around="loss", way="tensor"),
    Case(around="loss", way="weights", checked=False),
]


def name_of(case):
    changed = dataclasses.asdict(case).items()
    return " ".join(f"{k}={v}" for k, v in changed)


def compared(step, planned, held, batch):
    """Checks three steps of both."""
    expected, after = losses_of(jax.jit(step), held, batch)
    found, mine = losses_of(planned, held, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # Adam's first steps are of one size: a gradient's sign counts, not its last bits.
    for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(mine[0]), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=2e-3)
    assert not any("as written" in note for note in planned.plan.proof.notes)


@pytest.mark.slow
@pytest.mark.quick(*map(name_of, CASES[1::4]))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_step_computes_the_same_with_its_layers_computed_again(case, usual_promotion):
    mesh = mesh_of(case)
    step, (held, batch) = step_of(case, mesh), arrays(case, mesh)
    planned = stowax.jit(step, pin=RECOMPUTE, compiles=4, progress=False)
    compared(step, planned, held, batch)
    assert [d for d in planned.plan.decisions if d.decision == "recompute"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "role", "sizes"),
    [
        (Case(), "activation", MANY),
        (Case(checked=False), "optimizer state", MANY_WORDS),
        (Case(way="tensor", around="loss"), "activation", MANY),
        (Case(looped=True, around="loss"), "activation", MANY),
    ],
    ids=str,
)
def test_what_is_in_a_shard_map_leaves_the_device(case, role, sizes, usual_promotion):
    mesh, pin = mesh_of(case), {role: "offload"}
    step, (held, batch) = step_of(case, mesh), arrays(case, mesh, sizes)
    planned = stowax.jit(step, pin=pin, target="h200x8", compiles=4, progress=False)
    compared(step, planned, held, batch)
    found = planned.plan
    moved = [d for d in found.decisions if d.decision == "offload"]
    assert {d.role for d in moved} == {role}
    assert found.host_bytes >= 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("around", "looped"), [("step", False), ("loss", True)])
def test_a_step_in_a_shard_map_fits_half_of_what_it_takes(
    around, looped, usual_promotion
):
    """Its loss in blocks of tokens, for one: a device's tokens are its own."""
    case = Case(around=around, looped=looped)
    mesh = mesh_of(case)
    step, (held, batch) = step_of(case, mesh), arrays(case, mesh, MANY)
    planned = stowax.jit(
        step, budget="45%", target="h200x8", compiles=4, progress=False
    )
    compared(step, planned, held, batch)
    found = planned.plan
    assert found.fits
    assert any("blocks of tokens" in note for note in found.proof.notes)
    assert found.device_bytes <= 0.45 * found.search.written.compiled_bytes
