"""JAX's host-offloading tutorial, its last part: four layers of 7168 × 7168 and Adam.

To the letter of the page, functions and names included; knows nothing of stowax. `step`
is the one that keeps everything on the device, `offloaded_step` the page's recipe for
optimizer state in host memory.
"""

import jax
import jax.numpy as jnp
import optax

DIM = 7168

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate=0.1))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def single_layer(x, w):
    return x @ w


def forward(params, x):
    for i in range(1, 5):
        x = gelu(single_layer(x, params[f"w{i}"]))
    return x


def compute_loss(params, inputs):
    outputs = forward(params, inputs)
    loss = jnp.mean((outputs - inputs) ** 2)
    l2_reg = 0.001 * sum(jnp.sum(w**2) for w in jax.tree_util.tree_leaves(params))
    return loss + l2_reg


def step(params, opt_state, inputs):
    grads = jax.grad(lambda p: compute_loss(p, inputs))(params)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), new_opt_state


def offloaded_step(params, opt_state, inputs):
    grads = jax.grad(lambda p: compute_loss(p, inputs))(params)
    opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, new_opt_state


def arguments(dim=DIM):
    """Specs of `(params, opt_state, inputs)`."""
    spec = jax.ShapeDtypeStruct((dim, dim), jnp.float32)
    params = {f"w{i}": spec for i in range(1, 5)}
    return params, jax.eval_shape(optimizer.init, params), spec
