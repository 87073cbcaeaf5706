"""State that cannot leave the device: the reason, in errors, decisions and notes."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import plan, spec
from stowax._errors import ArgumentError

LAYERS, WIDTH, ROWS = 3, 1024, 32
MATRIX = spec(WIDTH, WIDTH)
STACKED = spec(LAYERS, WIDTH, WIDTH)
X = spec(ROWS, WIDTH)
PARAMETER = {"parameter": "offload"}


def scan(w, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0]


@stowax.stow
def loss_fn(params, x):
    x = x @ params["embed"] if "embed" in params else x
    x = x * (1 + params["norm"]) if "norm" in params else x
    w = jnp.moveaxis(params["w"], params["w"].shape.index(LAYERS), 0)
    x = scan(w, x)
    if "tied" in params:
        x = x @ params["w"][0]
    return jnp.mean(x**2)


def train(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@stowax.stow
def crossed(params, x):
    for axis in (0, 1):
        w = jnp.moveaxis(params["w"], axis, 0)
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, w)[0]
    return jnp.mean(x)


def both_ways(params, x):
    grads = jax.grad(crossed)(params, x[:, :ROWS])
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def refused(step, *args, **options):
    with pytest.raises(ArgumentError) as caught:
        plan(step, *args, **options)
    return str(caught.value)


def gives_back_a_part(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return {"embed": params["embed"] - 0.1 * grads["embed"]}, grads["w"]


def loses_its_momentum(params, momentum, x):
    grads = jax.grad(loss_fn)(params, x)
    new = jax.tree.map(lambda p, m, g: p - m - 0.1 * g, params, momentum, grads)
    return new, jax.tree.map(lambda m: m.astype(jnp.bfloat16), momentum)


CASES = {
    "outside": (
        train,
        ({"w": STACKED, "embed": MATRIX}, X),
        {"pin": {"*embed*": "offload"}},
        "args[0]['embed'], float32[1024,1024]: something outside of repeated layers "
        "needs it, or no repeated layer reads it",
    ),
    "tied": (
        train,
        ({"w": STACKED, "tied": MATRIX}, X),
        {"pin": {"*'w'*": "offload"}},
        "what is made of it is needed whole on the device",
    ),
    "small": (
        train,
        ({"w": STACKED, "norm": spec(1, WIDTH)}, X),
        {"pin": {"*norm*": "offload"}},
        "args[0]['norm'], float32[1,1024]: it is smaller than 4.00 MiB on a device",
    ),
    "several axes": (
        both_ways,
        ({"w": spec(ROWS, ROWS, WIDTH * LAYERS)}, X),
        {"target": "v5p-8", "pin": PARAMETER},
        "layers lie along several axes of it, or of what is updated with it, and a TPU",
    ),
    "tiles": (
        train,
        ({"w": spec(LAYERS, 1100, 1100)}, spec(ROWS, 1100)),
        {"target": "v5p-8", "pin": PARAMETER},
        "its rows do not fill the tiles that a TPU copies",
    ),
    "not given back": (
        gives_back_a_part,
        ({"w": STACKED, "embed": MATRIX}, X),
        {"pin": {"*embed*": "offload"}},
        "the step does not give back args[0]['w'], so args[0] is not donated",
    ),
    "another type": (
        loses_its_momentum,
        ({"w": STACKED}, {"w": STACKED}, X),
        {"pin": {"optimizer state": "offload"}},
        "the step returns nothing in its type that takes its place",
    ),
    "not donated": (
        train,
        ({"w": STACKED}, X),
        {"pin": PARAMETER, "donate": False},
        "it is updated in its place in host memory, which donate=False forbids",
    ),
    "computed again": (
        train,
        ({"w": STACKED}, X),
        {"pin": {"parameter": "recompute"}},
        "it is given to the step, so it cannot be computed again",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pin_on_what_stays_says_why_it_does(name):
    step, args, options, why = CASES[name]
    text = refused(step, *args, **options)
    (asked,) = options["pin"].values()
    assert f"got {asked!r}, which is impossible for args[" in text
    assert why in text
    assert "Pin it to 'keep'" in text


@pytest.mark.slow
def test_the_plan_lists_what_stays_and_why():
    params = {"w": STACKED, "embed": MATRIX, "norm": spec(1, WIDTH)}
    found = plan(train, params, X, pin={"*'w'*": "offload", "*embed*": "keep"})
    state = {d.name: d for d in found.decisions if d.stack == "state"}
    assert set(state) == {"args[0]['w']", "args[0]['embed']"}
    embed = state["args[0]['embed']"]
    assert (embed.decision, embed.role) == ("keep", "parameter")
    assert (embed.count, embed.bytes) == (1, 4 * WIDTH**2)
    assert embed.pinned == "*embed*"
    assert embed.reason.startswith("it stays: something outside of repeated layers")
    assert "embed" in str(found)
    note = (
        "1 array of the state (4.00 KiB) stays on the device: copies of less than "
        "4.00 MiB are not worth it"
    )
    assert note in found.proof.notes
    # Where nothing of the state leaves there is nothing to be said of what stays.
    assert not [n for n in plan(train, params, X).proof.notes if "of the state" in n]
