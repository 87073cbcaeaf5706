"""What somebody else looks at is copied before a step overwrites it in host memory."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stowax._state._held import HeldStep, copied

REFUSED = (
    "INVALID_ARGUMENT: Invalid buffer passed to Execute() as argument 5 to replica 0: "
    "INVALID_ARGUMENT: Donation requested for buffer with external reference"
)


def in_host_memory(spread):
    rows = jnp.arange(32.0).reshape(8, 4)
    if spread:
        mesh = jax.make_mesh((8,), ("data",))
        rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    return jax.device_put(rows, jax.memory.Space.Host)


class Refusing:
    """As a GPU does: what is held is not overwritten, and nothing has run."""

    def __init__(self, held, error):
        self.held, self.error, self.calls = held, error, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if any(leaf is self.held for leaf in jax.tree.leaves((args, kwargs))):
            raise self.error
        return args, kwargs

    def lower(self, *args):
        return "lowered", args


@pytest.mark.parametrize("spread", [False, True])
def test_a_copy_is_in_the_same_place_and_of_its_own(spread):
    array = in_host_memory(spread)
    found = copied(array)
    assert found.sharding == array.sharding
    assert found.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(found, array)
    for one, other in zip(
        found.addressable_shards, array.addressable_shards, strict=True
    ):
        assert one.data.unsafe_buffer_pointer() != other.data.unsafe_buffer_pointer()


def test_what_is_on_the_device_is_not_copied():
    array = jnp.arange(3.0)
    assert copied(array) is array
    assert copied(3.0) == 3.0


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_refused_step_is_called_again_with_copies(kind):
    held, batch = in_host_memory(False), jnp.ones(2)
    inner = Refusing(held, kind(REFUSED))
    (state, data), _ = HeldStep(inner, (0,))({"moment": held}, batch)
    assert inner.calls == 2
    assert state["moment"] is not held
    assert data is batch
    np.testing.assert_array_equal(state["moment"], held)


def test_what_may_not_be_overwritten_is_not_copied():
    held, batch = in_host_memory(False), in_host_memory(False)
    (state, data), _ = HeldStep(Refusing(held, ValueError(REFUSED)), (0,))(held, batch)
    assert state is not held
    assert data is batch


def test_other_errors_are_the_steps_own():
    held = in_host_memory(False)
    inner = Refusing(held, ValueError("shapes do not agree"))
    with pytest.raises(ValueError, match="shapes do not agree"):
        HeldStep(inner, (0,))(held)
    assert inner.calls == 1


def test_it_is_copied_and_bound_as_a_function():
    step = HeldStep(Refusing(None, None), ())

    class Trainer:
        train = step

    trainer = Trainer()
    assert copy.deepcopy(step)(1) == step(1)
    assert trainer.train(1) == ((trainer, 1), {})
    assert isinstance(step, jax.stages.Wrapped)


def test_it_is_lowered_as_what_it_wraps():
    assert HeldStep(Refusing(None, None), ()).lower(1) == ("lowered", (1,))
