"""Training loops with one planted fault each, its line marked, and their clean twins.

The test pairs `NAME` with `NAME_clean`; `# here: KIND` marks the line at which the
finding has to be. Transfers are in this file, programs and memory in
`audit_loops_programs`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import stowax

STEPS = 6
WEIGHTS = (16, 16)


@jax.jit
def step(w, x):
    """A step that returns its state and a loss; small enough to owe no donation."""
    return w - jnp.float32(0.1) * x, jnp.sum(w * x)


@jax.jit
def step_with_rate(w, x, rate):
    return w - rate * x


def weights():
    return jnp.ones(WEIGHTS, jnp.float32)


def batches(count=STEPS):
    random = np.random.default_rng(0)
    for _ in range(count):
        yield random.normal(size=WEIGHTS).astype(np.float32)


def placed():
    return [jax.device_put(batch) for batch in batches()]


# --- explicit placement -------------------------------------------------------------


def numpy_batch():
    w = weights()
    for x in batches():
        w, _ = step(w, x)  # here: implicit-transfer


def numpy_batch_clean():
    w = weights()
    for x in stowax.prefetch(batches()):
        w, _ = step(w, x)


def numpy_keyword():
    w = weights()
    for x in batches():
        w, _ = step(w, x=x)  # here: implicit-transfer


def numpy_keyword_clean():
    w = weights()
    for x in batches():
        x = jax.device_put(x)
        w, _ = step(w, x=x)


def loop_index():
    w = weights()
    for k, x in enumerate(placed()):
        w = step_with_rate(w, x, 0.5 / (k + 1))  # here: implicit-transfer


def loop_index_clean():
    @jax.jit
    def stepped(w, x, k):
        return w - jnp.float32(0.5) / (k + 1).astype(jnp.float32) * x, k + 1

    w, k = weights(), jnp.int32(0)
    for x in placed():
        w, k = stepped(w, x, k)


def constant_rate():
    w = weights()
    for x in placed():
        w = step_with_rate(w, x, 0.1)  # here: repeated-constant


def constant_rate_clean():
    w, rate = weights(), jnp.float32(0.1)
    for x in placed():
        w = step_with_rate(w, x, rate)


def constant_mask():
    w, mask = weights(), np.ones(WEIGHTS, np.float32)
    for _ in range(STEPS):
        w, _ = step(w, mask)  # here: repeated-constant


def constant_mask_clean():
    w, mask = weights(), jax.device_put(np.ones(WEIGHTS, np.float32))
    for _ in range(STEPS):
        w, _ = step(w, mask)


def placed_each_step():
    w, mask = weights(), np.ones(WEIGHTS, np.float32)
    for _ in range(STEPS):
        mask_there = jax.device_put(mask)  # here: repeated-constant
        w, _ = step(w, mask_there)


placed_each_step_clean = constant_mask_clean


def bouncing_state():
    here, there = jax.devices()[:2]
    w = jax.device_put(weights(), here)
    for x in placed():
        w, _ = step(w, x)
        away = jax.device_put(w, there)  # here: moved-array
        w = jax.device_put(away, here)


def bouncing_state_clean():
    w = weights()
    for x in placed():
        w, _ = step(w, x)


def bouncing_memory():
    w = jax.device_put(weights(), jax.devices()[0])
    host = w.sharding.with_memory_kind("unpinned_host")
    for x in placed():
        stored = jax.device_put(w, host)  # here: moved-array
        w, _ = step(jax.device_put(stored, x.sharding), x)


bouncing_memory_clean = bouncing_state_clean


def left_on_another_device():
    spread = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    w, mask = jax.device_put(weights(), spread), jnp.ones(WEIGHTS, jnp.float32)
    for x in placed():
        x = jax.device_put(np.asarray(x), spread)  # stowax: allow host-read
        w = step_with_rate(w, x, mask)  # here: moved-array


def left_on_another_device_clean():
    spread = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    w = jax.device_put(weights(), spread)
    mask = jax.device_put(jnp.ones(WEIGHTS, jnp.float32), spread)
    for x in batches():
        w = step_with_rate(w, jax.device_put(x, spread), mask)


# --- batching -----------------------------------------------------------------------


def put_leaf_by_leaf():
    w = weights()
    for x in batches():
        parts = {}
        for k in range(8):
            parts[k] = jax.device_put(x[2 * k : 2 * k + 2])  # here: many-transfers
        w = joined(w, parts)


def put_leaf_by_leaf_clean():
    w = weights()
    for x in batches():
        parts = jax.device_put({k: x[2 * k : 2 * k + 2] for k in range(8)})
        w = joined(w, parts)


@jax.jit
def joined(w, parts):
    return w + jnp.concatenate([parts[k] for k in range(8)])


@jax.jit
def measured(w, x):
    return w - x, {k: jnp.sum(w) * k for k in range(6)}


def read_leaf_by_leaf():
    w = weights()
    for x in placed():
        w, metrics = measured(w, x)
        for value in metrics.values():
            jax.device_get(value)  # here: many-transfers


def read_leaf_by_leaf_clean():
    w, late = weights(), None
    for x in placed():
        w, metrics = measured(w, x)
        if late is not None:
            jax.device_get(late)
        late = metrics


# --- reading results ----------------------------------------------------------------


def float_loss():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        float(loss)  # here: host-read


def float_loss_clean():
    """One step late: the device has work while the host reads."""
    w, before = weights(), None
    for x in placed():
        w, loss = step(w, x)
        if before is not None:
            float(before)
        before = loss


def item_loss():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        loss.item()  # here: host-read


def item_loss_clean():
    """Seldom enough."""
    w = weights()
    for k, x in enumerate(placed()):
        w, loss = step(w, x)
        if k % 5 == 4:
            loss.item()


def printed_loss():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        f"{loss:.3f}"  # here: host-read


def printed_loss_clean():
    w, losses = weights(), []
    for x in placed():
        w, loss = step(w, x)
        losses.append(loss)
    f"{np.mean(jax.device_get(losses)):.3f}"


def numpy_of_result():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        np.asarray(loss)  # here: host-read


numpy_of_result_clean = printed_loss_clean


def numpy_function():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        np.tanh(loss)  # here: host-read


def numpy_function_clean():
    """NumPy asks an array for its own mean, and leaves operators to it."""
    w, scale = weights(), jnp.float32(1)
    for x in placed():
        w, _ = step(w, x)
        scale = np.mean(scale)


def branch_on_loss():
    w = weights()
    for x in placed():
        w, loss = step(w, x)
        if loss > 1e9:  # here: host-read
            break


branch_on_loss_clean = item_loss_clean


def waits():
    w = weights()
    for x in placed():
        w, _ = step(w, x)
        jax.block_until_ready(w)  # here: early-wait


def waits_clean():
    w = weights()
    for x in placed():
        w, _ = step(w, x)
    w.block_until_ready()


@jax.jit
def tiled(w):
    return jnp.tile(w, (4, 4))


def kept_on_the_host():
    w, kept = weights(), []
    for x in placed():
        w, _ = step(w, x)
        kept.append(np.array(tiled(w)))  # here: growing-memory
    return kept


kept_on_the_host.also = ("host-read",)
kept_on_the_host_clean = waits_clean
