"""Calibrating: the bookkeeping of timing, and what becomes of it, by clocks of ours."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import jax
import pytest

import stowax
from stowax._calibrate import _calibrate
from stowax._calibrate._calibrate import Effort, measure_machine
from stowax._calibrate._stopwatch import Stopwatch, per_second
from stowax._errors import ArgumentError
from stowax._hardware._hardware import CHIPS
from stowax._records._calibration import calibration_of
from stowax._target._calibration_file import VARIABLE, find_calibration

KIB = 1024
SMALL = Effort(
    copies=(64 * KIB, 256 * KIB),
    products=(32,),
    stream=64 * KIB,
    arithmetic=16 * KIB,
    repeats=2,
    update=64 * KIB,
    seconds=1e9,
    rounds=3,
)


class Clock:
    """Stands still but for what a program takes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def program(self, *seconds):
        """A program that takes so long, in turn, and the last for ever."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def ticking():
    """A clock on which a second passes whenever it is read."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def test_compiling_is_no_sample_and_a_disturbance_does_not_count():
    clock = Clock()
    # Ten seconds to compile, then 2; once something else takes the machine.
    slow = clock.program(10.0, 2.0, 2.0, 50.0, 2.0, 2.0, 2.0)
    watch = Stopwatch(wait=lambda made: None, clock=clock, rounds=5, most_seconds=100.0)
    assert watch.seconds(slow) == [2.0]


def test_short_runs_are_sampled_together_and_programs_take_turns():
    clock, order = Clock(), []

    def program(name, seconds):
        def run():
            order.append(name)
            clock.now += seconds

        return run

    watch = Stopwatch(
        wait=lambda made: None,
        clock=clock,
        sample_seconds=1.0,
        most_seconds=100.0,
        most_runs=4,
        rounds=2,
    )
    found = watch.seconds(program("a", 0.5), program("b", 0.125), program("c", 3.0))
    assert found == [0.5, 0.125, 3.0]
    # Each once to compile and once to see how long it takes; then in rounds, as many
    # at a time as take a second, and at most four.
    one_round = "aa" + "bbbb" + "c"
    assert "".join(order) == "aabbcc" + one_round * 2


def test_measuring_ends_when_its_time_is_up():
    clock, runs = Clock(), []

    def run():
        runs.append(1)
        clock.now += 2.0

    watch = Stopwatch(wait=lambda made: None, clock=clock, most_seconds=3.0, rounds=100)
    assert watch.seconds(run) == [2.0]
    assert len(runs) == 1 + 1 + 2  # compiled, looked at, two rounds of 2 s


@pytest.mark.parametrize(("one_by_one", "waits"), [(False, 1), (True, 4)])
def test_what_is_waited_for(one_by_one, waits):
    clock, waited = Clock(), []
    watch = Stopwatch(
        wait=waited.append,
        one_by_one=one_by_one,
        clock=clock,
        sample_seconds=1.0,
        rounds=1,
    )
    watch.seconds(clock.program(0.25))
    before = 2 + 2 * one_by_one
    assert len(waited) - before == waits + one_by_one


def test_a_clock_that_stands_still_measures_nothing():
    with pytest.raises(ValueError, match="the clock did not move"):
        per_second(1.0, [0.0])


def test_rates_are_what_the_programs_do_in_their_seconds():
    devices = jax.devices("cpu")
    found = measure_machine(devices, SMALL, lambda line: None, ticking())
    # By this clock each run takes a second: a rate is what a run does on one device.
    assert found.unmeasured == ()
    assert found.device_count == len(devices) == 8
    dtypes = ("bfloat16", "float32", "float16", "float8", "int8")
    assert found.matrix == dict.fromkeys(dtypes, 2 * (2 * 32**3))
    assert found.memory_bandwidth == 2 * SMALL.stream * SMALL.repeats
    assert found.vector == SMALL.arithmetic // 4 * 64 * 3 * SMALL.repeats
    assert found.host_update == (3 + 3 + 4) * SMALL.update
    assert found.host_update_by == "these devices"
    assert [(c.bytes, c.out, c.into, c.both) for c in found.copies] == [
        (size, size, size, size) for size in SMALL.copies
    ]
    assert found.link.bytes == SMALL.copies[-1]
    assert found.one_memory
    assert found.versions["jax"] == jax.__version__


@pytest.mark.slow
def test_what_fails_is_listed_and_the_others_go_on(monkeypatch, tmp_path):
    real = _calibrate.programs.products

    def products(devices, dtype, size):
        if dtype == "int8":
            raise NotImplementedError("no such unit\nand a long stack")
        return real(devices, dtype, size)

    monkeypatch.setattr(_calibrate.programs, "products", products)
    monkeypatch.setattr(_calibrate, "cpu_effort", lambda count: SMALL)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here.json"))
    lines = []
    found = stowax.calibrate("cpu", save=False, progress=lines.append)
    assert list(tmp_path.iterdir()) == []
    (missing,) = found.unmeasured
    assert missing.what == "matrix int8"
    assert missing.why == "NotImplementedError: no such unit"
    assert "int8" not in found.matrix
    assert "not measured: matrix int8 (NotImplementedError: no such unit)" in lines
    assert "matrix int8" in str(found)


@pytest.mark.slow
def test_what_there_is_is_kept_before_each_further_step(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here.json"))
    monkeypatch.setattr(_calibrate, "cpu_effort", lambda count: SMALL)
    real = _calibrate.programs.products

    def products(devices, dtype, size):
        if dtype == "float8_e4m3fn":
            raise KeyboardInterrupt  # or a compiler that ends the process
        return real(devices, dtype, size)

    monkeypatch.setattr(_calibrate.programs, "products", products)
    with pytest.raises(KeyboardInterrupt):
        stowax.calibrate("cpu", progress=False)
    kept, _ = find_calibration("cpu", len(jax.devices("cpu")), jax.__version__)
    assert list(kept.matrix) == ["bfloat16", "float32", "float16"]
    assert kept.link is not None
    (missing,) = kept.unmeasured
    assert (missing.what, missing.why) == ("matrix float8", "the process ended in it")
    # Now there is one: the next does not replace it before it is whole.
    before = (tmp_path / "here.json").read_text()
    with pytest.raises(KeyboardInterrupt):
        stowax.calibrate("cpu", progress=False)
    assert (tmp_path / "here.json").read_text() == before


def test_nothing_is_begun_after_the_time_is_up():
    effort = dataclasses.replace(SMALL, seconds=0.0)
    found = measure_machine(jax.devices("cpu")[:1], effort, print, ticking())
    assert (found.matrix, found.copies, found.link) == ({}, (), None)
    assert {item.why for item in found.unmeasured} == {"no time was left"}
    # It can be kept, read and shown all the same.
    kept = calibration_of(json.loads(json.dumps(found.to_json())))
    assert kept.to_json() == found.to_json()
    assert "Not measured" in str(found)


def test_a_rate_beyond_what_is_quoted_is_not_believed():
    chip = CHIPS["h200"]
    figure = chip.memory_bandwidth
    assert _calibrate._believed(0.9 * figure.value, figure, chip) == 0.9 * figure.value
    with pytest.raises(ValueError, match=r"not believed where 4\.8e\+12 is"):
        _calibrate._believed(2 * figure.value, figure, chip)
    assumed = CHIPS["cpu"]  # an order of magnitude is no limit
    high = 100 * assumed.memory_bandwidth.value
    assert _calibrate._believed(high, assumed.memory_bandwidth, assumed) == high


@pytest.mark.slow
def test_the_machine_is_really_measured_and_the_result_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "here.json"))
    monkeypatch.setattr(_calibrate, "cpu_effort", lambda count: SMALL)
    lines = []
    found = stowax.calibrate("cpu", progress=lines.append)
    assert isinstance(found, _calibrate.Calibration)
    assert found.device_count == len(jax.devices("cpu"))
    assert found.unmeasured == ()
    assert min(found.matrix.values()) > 0
    kept, note = find_calibration("cpu", found.device_count, jax.__version__)
    assert (kept.to_json(), note) == (found.to_json(), None)
    assert lines[-1].startswith("saved ")
    assert lines[0] == "measuring copies of 64.0 KiB"


@pytest.mark.parametrize("name", ["v5p-8", "h200", 3])
def test_what_is_not_attached_cannot_be_measured(name):
    with pytest.raises(ArgumentError, match="what is measured has to be attached"):
        stowax.calibrate(name)


@pytest.mark.slow
def test_the_command_on_one_device(tmp_path):
    """As a user types it: in a process of its own, with one CPU device."""
    quick = (
        "import stowax._calibrate._calibrate as c, test_calibrate as t\n"
        "import stowax._cli._cli as cli\n"
        "c.cpu_effort = lambda count: t.SMALL\n"
        "cli.main(['calibrate', '--json'])"
    )
    environment = {**os.environ, VARIABLE: str(tmp_path / "c.json")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    settings = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", quick],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "c.json").read_text())
    assert calibration_of(json.loads(done.stdout)).device_count == 1
    assert "measuring memory bandwidth" in done.stderr
