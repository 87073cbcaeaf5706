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
MANY_ROWS = 8192, 256
MANY_WORDS = 512, 8192
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
    Case(way="weights"),
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
@pytest.mark.quick(*map(name_of, CASES[1::3]))
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
        (Case(), "activation", MANY_ROWS),
        (Case(checked=False), "optimizer state", MANY_WORDS),
        (Case(way="tensor", around="loss"), "activation", MANY_ROWS),
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
def test_a_step_in_a_shard_map_fits_half_of_what_it_takes(usual_promotion):
    """Its loss in blocks of tokens, for one: a device's tokens are its own."""
    mesh = mesh_of(Case())
    step, (held, batch) = step_of(Case(), mesh), arrays(Case(), mesh, MANY)
    planned = stowax.jit(
        step, budget="45%", target="h200x8", compiles=4, progress=False
    )
    compared(step, planned, held, batch)
    found = planned.plan
    assert found.fits
    assert any("blocks of tokens" in note for note in found.proof.notes)
    assert found.device_bytes <= 0.45 * found.search.written.compiled_bytes


@pytest.mark.slow
def test_a_python_loop_in_a_shard_map_is_cut_into_segments(usual_promotion):
    """What is recomputed waits behind barriers that leave each device's types alone."""
    case = Case(looped=True, around="loss")
    mesh = mesh_of(case)
    step, (held, batch) = step_of(case, mesh), arrays(case, mesh)
    planned = stowax.jit(
        step, pin=RECOMPUTE, target="h200x8", compiles=4, progress=False
    )
    compared(step, planned, held, batch)
    assert any("segments" in note for note in planned.plan.proof.notes)


def weights_and_examples(mesh):
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P()))
    w = put(jax.random.normal(jax.random.key(0), (LAYERS, 64, 64)) / 8)
    x = jax.random.normal(jax.random.key(1), (64, 64))
    return w, jax.device_put(x, NamedSharding(mesh, P("data")))


def wave(w, x):
    return jnp.var(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0])


def each_example(mesh):
    """Gradients of examples, as of DP-SGD, on each device."""

    def local(w, x):
        run = jax.vmap(jax.value_and_grad(wave), in_axes=(None, 0))
        value, grads = run(w, x[:, None])
        return w - 0.1 * jnp.tanh(grads).mean(0), jax.lax.pmean(value.mean(), "data")

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )


def checked_ensemble(mesh):
    def local(w, x):
        run = jax.vmap(jax.value_and_grad(wave), in_axes=(0, None))
        value, grads = run(jnp.stack([w, 2 * w]), x)
        return w - 0.01 * grads.sum(0), jax.lax.pmean(value.mean(), "data")

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=True
    )


def over_one_axis(mesh):
    """Of a mesh of two with types; the compiler or types know of the other one."""

    def local(w, x):
        value, grads = jax.value_and_grad(wave)(w, x)
        return w - 0.01 * grads, jax.lax.pmean(value, "data")

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )


def checkpointed(mesh):
    part = jax.shard_map(
        lambda w, x: jax.lax.pmean(wave(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )

    def step(w, x):
        value, grads = jax.value_and_grad(jax.checkpoint(part))(w, x)
        return w - 0.1 * grads, value

    return step


@pytest.mark.slow
@pytest.mark.quick("over_one_axis", "checked_ensemble")
@pytest.mark.parametrize(
    "step_over",
    [each_example, checked_ensemble, over_one_axis, checkpointed],
    ids=lambda step: step.__name__,
)
def test_gradients_in_other_ways_are_planned_inside(step_over, usual_promotion):
    kind = AxisType.Explicit if step_over is over_one_axis else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        step, (w, x) = step_over(mesh), weights_and_examples(mesh)
        planned = stowax.jit(step, pin=RECOMPUTE, compiles=4, progress=False)
        for a, b in zip(jax.jit(step)(w, x), planned(w, x), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    assert [d for d in planned.plan.decisions if d.decision == "recompute"]
    assert not planned.plan.proof.notes


def shared_words(mesh, words):
    """A head whose words are spread over devices, which add up the softmax's parts."""

    def loss(head, x, labels):
        logits = x @ head
        most = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
        total = jax.lax.psum(jnp.exp(logits - most[:, None]).sum(-1), "model")
        mine = labels - jax.lax.axis_index("model") * logits.shape[1]
        here = (mine >= 0) & (mine < logits.shape[1])
        place = jnp.clip(mine, 0, logits.shape[1] - 1)[:, None]
        chosen = jnp.take_along_axis(logits, place, 1)[:, 0]
        chosen = jax.lax.psum(jnp.where(here, chosen, 0), "model")
        return jax.lax.pmean((jnp.log(total) + most - chosen).mean(), "data")

    part = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=(P(None, "model"), P("data"), P("data")),
        out_specs=P(),
    )

    def step(head, x, labels):
        value, grad = jax.value_and_grad(part)(head, x, labels)
        return head - 0.1 * grad, value

    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    head = jax.random.normal(jax.random.key(0), (64, words)) / 8
    labels = jax.random.randint(jax.random.key(1), (4096,), 0, words)
    x = jax.random.normal(jax.random.key(2), (4096, 64))
    return step, (put(head, None, "model"), put(x, "data"), put(labels, "data"))


@pytest.mark.slow
def test_a_loss_whose_words_are_spread_runs_in_blocks_of_tokens(usual_promotion):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, args = shared_words(mesh, 16384)
    planned = stowax.jit(step, budget="45%", target="h200x8", progress=False)
    expected, found = jax.jit(step)(*args), planned(*args)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    notes = planned.plan.proof.notes
    assert planned.plan.fits
    assert any("blocks of tokens" in note for note in notes)
