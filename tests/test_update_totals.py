"""The tutorial's Adam step, state streamed: bytes by the compilers for real chips.

Expected totals in symbols. One array has `A = 7168² · 4` bytes. All on the device the
step holds its arguments (parameters 4 A, moments 8 A, batch A) and temporaries T; with
the state in host memory it holds 8 A less, and a few blocks more.
"""

import functools

import pytest

import stowax
from adam_programs import streamed, whole
from benchmarks.models import adam_tutorial
from planned_models import target_or_skip

pytestmark = pytest.mark.usefixtures("full_effort")

ARRAY = 7168 * 7168 * 4
STATE = 8 * ARRAY
BLOCK = ARRAY // 64
GIB = 2**30


@functools.cache
def inspected(name):
    """Programs of all tests: each takes seconds to compile."""
    target = target_or_skip(name)
    plain = whole(target, adam_tutorial.step, "device", (0, 1))
    mine = streamed(target, adam_tutorial.step, adam_tutorial.arguments())
    return target, stowax.inspect(plain), stowax.inspect(mine)


@pytest.fixture(params=["h200", "v5p-8"])
def programs(request, usual_promotion):
    return inspected(request.param)


@pytest.mark.slow
def test_state_costs_no_device_memory_but_blocks(programs):
    target, plain, mine = programs
    assert mine.memory.host.argument == STATE
    assert mine.memory.host.alias == STATE  # in place
    assert mine.memory.host.temp == 0
    # Two moments, each with a block fetched and one that waits, in four loops; twice,
    # as libtpu counts what is inside of loops.
    blocks = 2 * 2 * 4 * 2 * BLOCK
    assert mine.memory.device.total <= plain.memory.device.total - STATE + blocks
    # libtpu's own report of its heap is 2.39 GiB; `temp` adds up places that overlap.
    bar = {"h200": 3.07, "v5p-8": 2.5}[target.name]
    assert mine.memory.device.total <= bar * GIB


@pytest.mark.slow
def test_blocks_go_out_and_in_at_once(programs):
    target, _, mine = programs
    assert not [h for h in mine.hazards if h.kind == "host-compute"]
    assert all(t.asynchronous for t in mine.transfers if t.bytes >= BLOCK)
    for direction in ("device-to-host", "host-to-device"):
        moved = sum(t.total_bytes for t in mine.transfers if t.direction == direction)
        # once through, and at most two blocks of each loop more
        assert STATE <= moved <= STATE * (1 + 2 / 64)
    seconds = STATE / min(target.link.device_to_host, target.link.host_to_device)
    assert mine.timeline.exposed_seconds <= 1.1 * seconds


@pytest.mark.slow
def test_every_copy_has_the_name_of_its_leaf(programs):
    target, _, mine = programs
    names = [t.op_name for t in mine.transfers if t.bytes >= BLOCK]
    leaves = range(5, 13)  # after four parameters and the count
    found = {i for i in leaves if any(f"stowax.state.{i}/" in name for name in names)}
    assert all("stowax.state." in name for name in names)
    # A GPU's compiler keeps one of several equal loop bodies, with one loop's names.
    assert found == set(leaves) or target.platform == "gpu"
