"""A planned state through a checkpoint: from host memory to disk, and back into it.

One process trains, saves, goes on and is killed; another one restores straight into the
planned memory kinds and goes on from there. Both are this file, run as a program.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import stowax
from planned_models import plan, spec
from stowax._errors import ArgumentError, PlanMismatchError

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

LAYERS, WIDTH, ROWS = 2, 512, 32
SAVED_AFTER, STEPS = 3, 6
OFFLOAD = {"optimizer state": "offload"}
OPTIMIZER = optax.adamw(1e-3)
MOMENTS = 2


@stowax.stow
def loss_fn(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def initial(width=WIDTH):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": 0.02 * jax.random.normal(keys[0], (LAYERS, width, 4 * width)),
        "down": 0.02 * jax.random.normal(keys[1], (LAYERS, 4 * width, width)),
    }
    return params, OPTIMIZER.init(params)


def batch(number):
    return jax.random.normal(jax.random.key(number), (ROWS, WIDTH))


def steps(found, mine, numbers):
    planned, losses = found.apply(step), []
    for number in numbers:
        *mine, loss = planned(*mine, batch(number))
        losses.append(float(loss))
    return mine, losses


def here(specs):
    """What `jax.eval_shape` returned, with the shardings that it dropped."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda s: s.update(sharding=sharding), specs)


def train(folder):
    """Never returns: it is killed with the last losses written."""
    found = stowax.load_plan(folder / "plan.json")
    mine = found.place(*initial())
    mine, _ = steps(found, mine, range(SAVED_AFTER))
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(folder / "saved", dict(zip("ps", mine, strict=True)))
    checkpointer.wait_until_finished()
    _, losses = steps(found, mine, range(SAVED_AFTER, STEPS))
    (folder / "never stopped").write_text(json.dumps(losses))
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder):
    """Goes on from what `train` saved, and says where every array was put."""
    found = stowax.load_plan(folder / "plan.json")
    params, state = found.specs(*here(jax.eval_shape(initial)))
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    with watched_puts() as puts:
        saved = checkpointer.restore(folder / "saved", {"p": params, "s": state})
    mine = saved["p"], saved["s"]
    restored = [kinds(tree) for tree in mine]
    _, losses = steps(found, mine, range(SAVED_AFTER, STEPS))
    report = {"losses": losses, "puts": puts, "kinds": restored}
    (folder / "resumed").write_text(json.dumps(report))


def kinds(tree):
    return [a.sharding.memory_kind for a in jax.tree.leaves(tree) if a.ndim]


class watched_puts:
    """Memory kinds of all arrays that `jax.device_put` makes meanwhile."""

    def __enter__(self):
        puts, put = [], jax.device_put

        def watched(*args, **kwargs):
            out = put(*args, **kwargs)
            puts.extend(kinds(out))
            return out

        self.patch = unittest.mock.patch("jax.device_put", watched)
        self.patch.start()
        return puts

    def __exit__(self, *_):
        self.patch.stop()


def specs_of(tree):
    return jax.tree.map(lambda a: spec(*a.shape, dtype=a.dtype), tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a plan, a checkpoint, and the losses of a run that went on."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shapes = jax.eval_shape(initial)
    with jax.numpy_dtype_promotion("standard"):
        found = plan(step, *shapes, spec(ROWS, WIDTH), pin=OFFLOAD)
    found.save(folder / "plan.json")
    killed = program("train", folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return folder


def program(mode, folder):
    return subprocess.run(
        [sys.executable, __file__, mode, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_another_process_goes_on_from_host_memory(saved):
    resumed = program("resume", saved)
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads((saved / "resumed").read_text())
    weights = jax.eval_shape(initial)[0]
    expected = ["device"] * len(weights), ["pinned_host"] * MOMENTS * len(weights)
    assert report["kinds"] == [*expected]
    # Everything was put where it is once, and nowhere before.
    assert sorted(report["puts"]) == sorted([*expected[0], *expected[1]])
    # The same program on the same numbers: the same bits.
    assert report["losses"] == json.loads((saved / "never stopped").read_text())


@pytest.mark.slow
def test_each_shard_is_restored_into_its_own_host_memory(tmp_path):
    # A step of one elementwise parameter: only where its momentum lies matters.
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def one(params, state, x):
        loss, grads = jax.value_and_grad(
            stowax.stow(lambda w, x: jnp.mean(jnp.tanh(w["w"]) * x))
        )(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def on(mesh, tree):
        cut = NamedSharding(mesh, PartitionSpec("fsdp"))
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: leaf.update(sharding=cut if leaf.ndim else whole), tree
        )

    params = {"w": spec(4096, 2048)}
    args = params, jax.eval_shape(optimizer.init, params), spec()
    target = stowax.target("h200x8")
    found = plan(
        one, *on(target.mesh((8,), ("fsdp",)), args), target="h200x8", pin=OFFLOAD
    )
    auto = (jax.sharding.AxisType.Auto,)
    specs = on(jax.make_mesh((8,), ("fsdp",), axis_types=auto), args)
    params, state, x = jax.tree.map(
        lambda s: jax.device_put(np.ones(s.shape, s.dtype), s.sharding), specs
    )
    params, state, _ = found.apply(one)(*found.place(params, state), x)
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", state)
    checkpointer.wait_until_finished()
    with watched_puts() as puts:
        back = checkpointer.restore(tmp_path / "saved", found.specs(specs[1]))
    assert set(puts) == {"pinned_host"}
    for left, right in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert left.sharding == right.sharding
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert kinds(back) == ["pinned_host"]


@pytest.mark.slow
def test_a_plan_of_another_shape_takes_no_restored_state(saved):
    found = stowax.load_plan(saved / "plan.json")
    _, other = here(jax.eval_shape(lambda: initial(2 * WIDTH)))
    with pytest.raises(PlanMismatchError) as caught:
        found.specs(other)
    assert str(caught.value) == (
        f"args[0][0].mu['down'] is float32[{LAYERS},{8 * WIDTH},{2 * WIDTH}], and the "
        "plan, which keeps args[1][0].mu['down'] in host memory, was made for "
        f"float32[{LAYERS},{4 * WIDTH},{WIDTH}]. Give the state that was planned; one "
        "of other shapes takes another plan."
    )


@pytest.mark.slow
def test_specs_of_what_eval_shape_returns_have_the_planned_kinds(saved):
    found = stowax.load_plan(saved / "plan.json")
    params, state = here(jax.eval_shape(initial))
    assert set(kinds(found.specs(state))) == {"pinned_host"}
    assert set(kinds(found.specs(params))) == {"device"}
    # Also of what a planned step will return, whose kinds jax.eval_shape drops.
    out = jax.eval_shape(found.apply(step), *found.specs(params, state), batch(0))
    kept = {leaf.sharding for leaf in jax.tree.leaves(out[1])}
    assert kept == {None}
    assert set(kinds(found.specs(*here(out[:2]))[1])) == {"pinned_host"}


@pytest.mark.slow
def test_state_without_a_sharding_beside_some_with_one_is_refused(saved):
    found = stowax.load_plan(saved / "plan.json")
    params, state = jax.eval_shape(initial)
    with pytest.raises(ArgumentError) as caught:
        found.specs(here(params), state)
    assert str(caught.value) == (
        "args[1][0].mu['down']: got a spec without a sharding beside some with one, "
        "and the plan keeps it in host memory. Give it the sharding that the step was "
        "planned with (spec.update(sharding=...)); jax.eval_shape drops it."
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    {"train": train, "resume": resume}[sys.argv[1]](pathlib.Path(sys.argv[2]))
