"""Batches on the device ahead of use: where they lie, how many, and how it ends."""

import gc
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax


def threads():
    return [t for t in threading.enumerate() if t.name == "stowax-prefetch"]


def test_batches_come_in_order_where_they_were_asked_for():
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.NamedSharding(mesh, jax.P("data"))
    batches = [{"x": np.full((8, 2), k, np.float32)} for k in range(5)]
    found = list(stowax.prefetch(batches, sharding=spread))
    assert [b["x"].sharding for b in found] == [spread] * 5
    assert [np.asarray(b["x"])[0, 0] for b in found] == [0, 1, 2, 3, 4]
    specs = {"x": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=spread)}
    (one,) = stowax.prefetch(batches[:1], sharding=specs)
    assert one["x"].sharding == spread


def test_no_more_than_size_batches_lie_ready():
    pulled = []
    third = threading.Event()

    def source():
        for k in range(10):
            pulled.append(k)
            if k == 2:
                third.set()
            yield np.ones(2)

    with stowax.prefetch(source(), size=2) as batches:
        assert not third.wait(0.2)  # two lie ready; nobody took one
        next(batches)
        assert third.wait(10)
    assert len(pulled) <= 4


def test_a_buffer_that_is_filled_again_changes_no_batch():
    # As JAX likes to share it: at a multiple of 64 bytes.
    room = np.zeros((1 << 12) + 16, np.float32)
    buffer = room[(-room.ctypes.data % 64) // 4 :][: 1 << 12]

    def source():
        for k in range(4):
            buffer[:] = k
            yield buffer

    found = [float(batch[7]) for batch in list(stowax.prefetch(source(), size=4))]
    assert found == [0, 1, 2, 3]


def test_an_error_is_raised_after_the_batches_before_it():
    def source():
        yield np.ones(2)
        raise OSError("no such shard")

    batches = stowax.prefetch(source())
    next(batches)
    with pytest.raises(OSError, match="no such shard"):
        next(batches)
    assert list(batches) == []
    with pytest.raises(TypeError, match="str"):
        list(stowax.prefetch(["not an array"]))


def test_leaving_early_ends_the_thread_and_closes_the_generator():
    closed = threading.Event()

    def source():
        try:
            while True:
                yield np.ones(2)
        finally:
            closed.set()

    before = len(threads())
    for _ in stowax.prefetch(source()):
        break
    gc.collect()
    assert closed.wait(10)
    batches = stowax.prefetch(source())
    next(batches)
    batches.close()
    assert list(batches) == []
    assert len(threads()) == before


def test_threads_that_share_batches_all_end():
    batches, got = stowax.prefetch([np.full(2, k) for k in range(30)]), []

    def take():
        for batch in batches:
            got.append(int(batch[0]))

    takers = [threading.Thread(target=take, daemon=True) for _ in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(20)
    assert not any(taker.is_alive() for taker in takers)
    assert sorted(got) == [*range(30)]


def test_a_thread_that_is_slow_to_take_the_last_batch_keeps_it():
    """Another one meets the end while it is still on its way."""
    batches, got = stowax.prefetch([np.full(2, 7)]), []
    queue, took, over = batches._shared.ready, threading.Event(), threading.Event()

    def get():
        item = queue.get()
        if item[0] == "batch":
            took.set()
            over.wait(20)
        return item

    batches._shared.ready = SimpleNamespace(get=get, put=queue.put)
    slow = threading.Thread(target=lambda: got.extend(batches), daemon=True)
    slow.start()
    assert took.wait(20)
    assert list(batches) == []
    over.set()
    slow.join(20)
    assert [int(batch[0]) for batch in got] == [7]


def test_closing_wakes_a_thread_that_waits():
    slow = threading.Event()

    def source():
        yield np.ones(2)
        slow.wait(20)

    batches = stowax.prefetch(source())
    waiting = threading.Thread(target=lambda: list(batches), daemon=True)
    waiting.start()
    batches.close()
    waiting.join(20)
    slow.set()
    assert not waiting.is_alive()


def test_settings_of_the_loop_hold_for_its_batches():
    with jax.default_device(jax.devices()[3]), jax.enable_x64(True):
        (batch,) = stowax.prefetch([np.ones(2, np.float64)])
    assert batch.dtype == np.float64
    assert batch.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(stowax.StowaxError, match=r"size: got .* 1 or more"):
        stowax.prefetch([], size=size)


def test_what_yields_nothing_is_refused():
    with pytest.raises(
        stowax.StowaxError, match=r"iterator: got int. Pass what yields"
    ):
        stowax.prefetch(3)  # pyright: ignore[reportArgumentType]
