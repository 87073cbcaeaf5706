"""Small steps with one thing wrong each, and their clean twins.

A name with `clean_` before it is the same step put right. Sizes: `LAYERS` layers on
`ROWS` rows of width `WIDTH` with `HIDDEN` hidden units, in bfloat16 (2 bytes).
"""

import functools
import inspect as reader
import unittest.mock
import warnings

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from compiled_programs import DEVICE, HIDE_COPIES, HOST, machine, offloaded
from stowax._inspect._inspect import inspect

LAYERS, ROWS, WIDTH, HIDDEN = 4, 512, 512, 2048


def _spec(*shape, sharding, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _weights(sharding, layers=LAYERS):
    return {
        "down": _spec(layers, HIDDEN, WIDTH, sharding=sharding),
        "up": _spec(layers, WIDTH, HIDDEN, sharding=sharding),
    }


def _layer(x, w):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return x + jnp.tanh(hidden) @ w["down"]


def _offloading(*names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _scanned(policy):
    """Loss and gradients of layers under a policy, in a scan."""

    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: (_layer(x, w), None), policy=policy)
        x, _ = jax.lax.scan(layer, x, ws)
        return jnp.sum(x.astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss))


def _rows(device):
    return _spec(ROWS, WIDTH, sharding=device)


def policy_names_nothing(device, host):
    return _scanned(jax.checkpoint_policies.save_only_these_names("hiden")), (
        _weights(device),
        _rows(device),
    )


def clean_policy(device, host):
    return _scanned(jax.checkpoint_policies.save_only_these_names("hidden")), (
        _weights(device),
        _rows(device),
    )


def policy_of_my_own(device, host):
    def policy(primitive, *_, **params):
        return params.get("name") == "hidden"

    return _scanned(policy), (_weights(device), _rows(device))


@jax.custom_vjp
def _block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def _block_forward(x, w):
    hidden = x @ w["up"]
    return x + jnp.tanh(hidden) @ w["down"], (x, w, jax.device_put(hidden, HOST))


def _block_backward(residuals, g):
    x, w, hidden = residuals
    y, back = jax.vjp(jnp.tanh, jax.device_put(hidden, DEVICE))
    (change,) = back(g @ w["down"].T)
    return g + change @ w["up"].T, {"down": y.T @ g, "up": x.T @ change}


_block.defvjp(_block_forward, _block_backward)


def round_trip_folded_away(device, host):
    """A Python loop of blocks that send what they keep to the host."""

    def loss(ws, x):
        for i in range(LAYERS):
            x = _block(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return jnp.sum(x.astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss)), (_weights(device), _rows(device))


def clean_offload(device, host):
    """In a scan the copies stay, and have as much work to hide them as there is."""
    return _scanned(_offloading("hidden")), (_weights(device), _rows(device))


def _update(state, gradient):
    """Momentum, on the device wherever the state lies."""
    weights, moment = (jax.device_put(s, DEVICE) for s in state)
    moment = 0.9 * moment + gradient
    return weights - 0.1 * moment, moment


def _state(weights, moment):
    shape = (2048, 2048)
    spec = functools.partial(_spec, *shape, dtype=jnp.float32)
    return (spec(sharding=weights), spec(sharding=moment)), spec(sharding=weights)


def state_comes_back_elsewhere(device, host):
    state, gradient = _state(device, host)
    jitted = jax.jit(_update, donate_argnums=0, out_shardings=(device, device))
    return jitted, (state, gradient)


def clean_state(device, host):
    state, gradient = _state(device, host)
    jitted = jax.jit(_update, donate_argnums=0, out_shardings=(device, host))
    return jitted, (state, gradient)


def specs_without_memory_kinds(device, host):
    """The moment was to be in host memory; `eval_shape` forgot it."""
    jitted, (state, gradient) = clean_state(device, host)
    weights, moment = state
    moment = jax.eval_shape(lambda moment: moment, moment)
    return jitted, ((weights, moment.update(sharding=device)), gradient)


def state_not_donated(device, host):
    state, gradient = _state(device, device)
    return jax.jit(_update), (state, gradient)


def clean_donated(device, host):
    state, gradient = _state(device, device)
    return jax.jit(_update, donate_argnums=0), (state, gradient)


def donated_for_nothing(device, host):
    state, gradient = _state(device, device)
    return jax.jit(
        lambda state, gradient: (_update(state, gradient), jnp.sum(gradient)),
        donate_argnums=(0, 1),
    ), (state, gradient)


def fetched_twice(device, host):
    """Two fetches of one array, both needed at the end."""

    def step(w, x):
        first = jax.device_put(w, DEVICE)
        y = jnp.tanh(x @ first)
        y, w = jax.lax.optimization_barrier((y, w))
        second = jax.device_put(w, DEVICE)
        return (y @ second) @ first

    square = functools.partial(_spec, 2048, 2048, dtype=jnp.float32)
    return jax.jit(step), (square(sharding=host), square(sharding=device))


def fetched_in_every_trip(device, host):
    def step(w, x):
        def body(x, _):
            return jnp.tanh(x @ jax.device_put(w, DEVICE)), None

        return jax.lax.scan(body, x, length=8)[0]

    square = functools.partial(_spec, 1024, 1024, dtype=jnp.float32)
    return jax.jit(step), (square(sharding=host), square(sharding=device))


def there_and_back(device, host):
    def step(w, x):
        away = jax.device_put(x, HOST)
        y = jnp.tanh(x @ w)
        y, away = jax.lax.optimization_barrier((y, away))
        back = jax.device_put(away, DEVICE)
        return (y @ back) + x

    square = functools.partial(_spec, 2048, 2048, dtype=jnp.float32)
    return jax.jit(step), (square(sharding=device), square(sharding=device))


def clean_fetch(device, host):
    def step(w, x):
        first = jax.device_put(w, DEVICE)
        y = jnp.tanh(x @ first)
        return (y @ first) @ first

    square = functools.partial(_spec, 2048, 2048, dtype=jnp.float32)
    return jax.jit(step), (square(sharding=host), square(sharding=device))


def cheap_values_offloaded(device, host):
    """A sine of the layer's input: offloaded, though it takes no time to make again."""

    def loss(ws, x):
        def layer(x, w):
            wave = checkpoint_name(jnp.sin(x), "wave")
            return x + (wave * wave) @ w, None

        layer = jax.checkpoint(layer, policy=_offloading("wave"))
        x, _ = jax.lax.scan(layer, x, ws)
        return jnp.sum(x.astype(jnp.float32))

    ws = _spec(LAYERS, WIDTH, WIDTH, sharding=device)
    return jax.jit(jax.value_and_grad(loss)), (ws, _spec(8192, WIDTH, sharding=device))


def clean_pipelined(device, host):
    """Values that leave one layer late, and come back one layer early."""
    jitted, args = offloaded(device, host)
    # A copy: JAX hands out its own set.
    platforms = {d.platform for d in device.device_set}
    options = HIDE_COPIES if "tpu" in platforms else None
    return jax.jit(jitted.__wrapped__, compiler_options=options), args


def many_small_copies(device, host):
    """Sixty-four vectors of state in host memory."""

    def step(state, gradient):
        put = functools.partial(jax.device_put, device=DEVICE)
        new = [put(s) + g for s, g in zip(state, gradient, strict=True)]
        return [jax.device_put(n, HOST) for n in new]

    spec = functools.partial(_spec, 1024, dtype=jnp.float32)
    count = range(64)
    return jax.jit(step, donate_argnums=0, out_shardings=host), (
        [spec(sharding=host) for _ in count],
        [spec(sharding=device) for _ in count],
    )


def one_large_copy(device, host):
    """The same vectors in one array."""

    def step(state, gradient):
        new = jax.device_put(state, DEVICE) + gradient
        return jax.device_put(new, HOST)

    spec = functools.partial(_spec, 64, 1024, dtype=jnp.float32)
    return jax.jit(step, donate_argnums=0, out_shardings=host), (
        spec(sharding=host),
        spec(sharding=device),
    )


def narrow_values_offloaded(device, host):
    """Values of 9 columns: a tile has 8 rows of 128."""

    def loss(ws, x):
        def layer(x, w):
            narrow = checkpoint_name(jnp.tanh(x @ w["in"]), "narrow")
            return x + narrow @ w["out"], None

        layer = jax.checkpoint(layer, policy=_offloading("narrow"))
        x, _ = jax.lax.scan(layer, x, ws)
        return jnp.sum(x.astype(jnp.float32))

    ws = {
        "in": _spec(LAYERS, WIDTH, 9, sharding=device),
        "out": _spec(LAYERS, 9, WIDTH, sharding=device),
    }
    return jax.jit(jax.value_and_grad(loss)), (ws, _spec(8192, WIDTH, sharding=device))


def pipelined_by_an_option(device, host):
    jitted, args = clean_offload(device, host)
    options = {"xla_gpu_enable_pipelined_host_offloading": True}
    return jax.jit(jitted.__wrapped__, compiler_options=options), args


PROGRAMS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__ and not name.startswith("_")
}


def _made(name, there):
    device = there.sharding(memory_kind="device")
    host = there.sharding(memory_kind="pinned_host")
    jitted, args = PROGRAMS[name](device, host)
    return jitted, args


@functools.cache
def inspected(name, target):
    """The inspection of the step called `name`, for the target of that name."""
    return inspect_on(name, machine(target))


def inspect_on(name, there):
    """The same on a machine."""
    jitted, args = _made(name, there)
    with warnings.catch_warnings():  # what is donated for nothing, JAX says, too
        warnings.filterwarnings("ignore", message="Some donated buffers were not")
        return inspect(jitted, *args, target=there)


@functools.cache
def context(name, target):
    """What the searches look at, for the step called `name`."""
    with unittest.mock.patch("stowax._inspect._inspect.find_hazards") as find:
        find.return_value = ((), ())
        inspect_on(name, machine(target))
    (found,), _ = find.call_args
    return found


def sharded(target):
    """Loss and gradients on four chips: layers over one axis, rows over the same."""
    there = machine(target)
    mesh = there.mesh((4,), ("data",))
    weights = there.sharding(None, "data", mesh=mesh)
    rows = there.sharding("data", mesh=mesh)
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return inspect(_scanned(policy), _weights(weights), _rows(rows), target=there)


def hazards_of(found, kind):
    return [hazard for hazard in found.hazards if hazard.kind == kind]


def line_of(function, text):
    """`file:line` of the line in `function` that holds `text`."""
    lines, first = reader.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"hazard_programs.py:{first + number}"
