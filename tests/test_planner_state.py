"""The planner's update phase: state beside activations, one link and one budget."""

import pytest

from planner_problems import chain, on_host, problem, state
from stowax._planner import baselines, evaluate, solve
from stowax._records._stages import Passage

KEPT = ("keep", "keep", "keep", "keep")


def test_the_update_waits_for_the_busier_direction():
    size, seconds, rate = 40, 2.0, 8.0
    p = problem(state(size, size, seconds=seconds), chain(), rate=rate)
    base = evaluate(p, (("keep", "keep"), KEPT)).seconds
    one = evaluate(p, (("offload", "keep"), KEPT))
    assert one.seconds == base + size / rate - seconds  # both directions side by side
    assert one.transfer_seconds == 2 * size / rate
    assert one.backward_window_used[0] == size / rate / seconds
    assert one.host_bytes == size
    # A window that is long enough hides it.
    roomy = problem(state(size, size, seconds=2 * size / rate), chain(), rate=rate)
    both = evaluate(roomy, (("offload", "offload"), KEPT))
    assert both.exposed_seconds == 0
    assert both.seconds == evaluate(roomy, (("keep", "keep"), KEPT)).seconds


def test_state_is_alive_throughout_and_the_update_may_be_the_peak():
    size, reserved = 40, 1000
    body = chain(count=10)  # 4 values of 8 bytes, 10 layers
    stacks = 10 * 4 * 8
    small = problem(state(size), body)
    assert evaluate(small, (("keep",), KEPT)).device_bytes == stacks + size
    assert evaluate(small, (("offload",), KEPT)).device_bytes == stacks
    # What the update needs adds to the state alone: activations are gone by then.
    peak = problem(state(size, reserved=reserved), body)
    assert evaluate(peak, (("keep",), KEPT)).device_bytes == reserved + size
    assert evaluate(peak, (("offload",), KEPT)).device_bytes == reserved


def test_what_is_cheaper_to_move_is_moved():
    # An activation's copy hides behind 30 s of layers; the state's has no window.
    body = chain(count=10, bytes=16)
    stacks = 10 * 4 * 16
    p = problem(state(100), body, device_bytes=100 + stacks - 10, rate=8.0)
    found = solve(p)
    assert found.outcome == "optimal"
    assert found.decisions[0] == ("keep",)
    # Where nothing else can go, the state goes.
    tight = problem(state(100), body, device_bytes=stacks // 8, rate=8.0)
    assert solve(tight).decisions[0] == ("offload",)


def test_state_that_stays_makes_a_budget_infeasible():
    p = problem(state(500, allowed={"keep"}), chain(), device_bytes=400)
    assert solve(p).outcome == "infeasible"
    assert solve(problem(state(500), chain(), device_bytes=400)).outcome == "optimal"


def test_state_and_nothing_else():
    p = problem(state(30, 50, seconds=1.0), device_bytes=60, rate=10.0)
    found = solve(p)
    # 80 bytes into 60: 30 go, at 10 bytes a second, of which one second hides.
    assert found.decisions == (("offload", "keep"),)
    assert found.evaluation.seconds == pytest.approx(1.0 + 30 / 10 - 1.0)


def test_parameters_take_their_part_of_the_layers_windows():
    # 10 layers of 3 s forward, 6 s backward; the link moves 8 bytes a second.
    rate, count = 8.0, 10
    passage = Passage(body="layer", forward_in=40, backward_in=64, backward_out=56)
    p = problem(state(400, passages=[passage], seconds=100.0), chain(), rate=rate)
    base = evaluate(p, (("keep",), KEPT))
    moved = evaluate(p, (("offload",), KEPT))
    forward = 40 / rate - 3.0
    backward = 64 / rate - 6.0  # in; out runs beside it
    assert moved.exposed_seconds == count * (forward + backward)
    assert moved.forward_window_used[1] == 40 / rate / 3.0
    assert moved.backward_window_used[1] == 64 / rate / 6.0
    # On the device: two layers' worth, and a gradient on its way out.
    in_flight = 2 * 64 + 56
    assert base.device_bytes == 400 + count * 4 * 8
    assert moved.device_bytes == count * 4 * 8 + in_flight
    # An activation and the parameters share the way back.
    offloads = ("offload", "keep", "keep", "keep")
    both = evaluate(p, (("offload",), offloads))
    assert both.backward_window_used[1] == (64 + 8) / rate / 6.0


def test_what_the_host_updates_does_not_cross_the_link():
    sizes, rate, seconds = (40, 24, 16), 8.0, 1.0
    part = on_host(sizes, 0, 1, seconds=seconds)
    p = problem(state(*sizes, host_updates=[part]), chain(), rate=rate)
    base = evaluate(p, (("keep",) * 3, KEPT)).seconds
    # All of a part has to be in host memory: else it streams as before.
    half = evaluate(p, (("offload", "keep", "keep"), KEPT))
    assert (half.seconds, half.host_seconds) == (base + 40 / rate, 0)
    both = evaluate(p, (("offload", "offload", "keep"), KEPT))
    assert (both.seconds, both.host_seconds) == (base + seconds, seconds)
    assert both.transfer_seconds == 0
    # The host works after what streams, not beside it.
    every = evaluate(p, (("offload",) * 3, KEPT))
    assert every.seconds == base + 16 / rate + seconds
    assert every.host_bytes == sum(sizes)


def test_a_part_for_the_host_makes_other_state_the_one_that_goes():
    # Two small arrays or the large one free the same bytes; the small ones go first.
    sizes, rate = (40, 40, 80), 8.0
    stream = problem(state(*sizes), device_bytes=80, rate=rate)
    assert solve(stream).decisions == (("offload", "offload", "keep"),)
    part = on_host(sizes, 2, seconds=1.0)
    p = problem(state(*sizes, host_updates=[part]), device_bytes=80, rate=rate)
    found = solve(p)
    assert found.decisions == (("keep", "keep", "offload"),)
    assert found.evaluation.seconds == 1.0 < 80 / rate
    assert found.outcome == "optimal"


def test_host_memory_is_shared_too():
    # The layers' inputs and three working values: enough for the state to stay.
    room = 100 + 10 * 16 + 4 * 16
    p = problem(state(100), chain(bytes=16), device_bytes=room, host_bytes=90)
    found = solve(p)
    assert found.outcome == "optimal"
    assert found.decisions[0] == ("keep",)  # 100 bytes would not go into 90
    assert found.evaluation.host_bytes <= 90


def test_the_baselines_leave_the_state_where_it_is_but_one():
    p = problem(state(10, 20), chain())
    moved = {
        name: "offload" in decisions[0] for name, decisions in baselines(p).items()
    }
    assert moved == {
        "keep all": False,
        "recompute all": False,
        "offload layer inputs": False,
        "offload state": True,
    }
    assert "offload state" not in baselines(problem(chain()))
