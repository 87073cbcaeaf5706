"""Where calibrations are kept, which are used, and what is said of the others."""

import dataclasses
import json

import jax
import pytest
from click.testing import CliRunner

import stowax
from stowax._cli._cli import main
from stowax._cost._cost import seconds
from stowax._cost._record import OperationCost
from stowax._errors import ArgumentError
from stowax._hardware._calibrated import calibrated
from stowax._hardware._hardware import CHIPS
from stowax._records._calibration import (
    CalibrationRecord,
    CopyRates,
    Unmeasured,
    calibration_of,
)
from stowax._records._stages import Link
from stowax._target import _calibration_file
from stowax._target._calibration_file import (
    VARIABLE,
    calibration_path,
    find_calibration,
    host_name,
    save_calibration,
)
from stowax._target._target import targets_table
from stowax.report import calibration_text, target_text, targets_text

GB, TERA = 10**9, 10**12
COUNT = len(jax.devices("cpu"))
FOUND = CalibrationRecord(
    device_kind="cpu",
    platform="cpu",
    host=host_name(),
    device_count=COUNT,
    date="2026-11-21T12:00:00+00:00",
    versions={"jax": jax.__version__, "stowax": "0.1.0"},
    matrix={"bfloat16": 0.3 * TERA, "float32": 0.2 * TERA, "int8": 0.6 * TERA},
    memory_bandwidth=7 * GB,
    vector=0.05 * TERA,
    copies=(
        CopyRates(bytes=2**20, out=1 * GB, into=2 * GB, both=1 * GB),
        CopyRates(bytes=2**26, out=4 * GB, into=5 * GB, both=3 * GB),
    ),
    host_update=6 * GB,
    host_update_by="these devices",
    one_memory=True,
    unmeasured=(Unmeasured(what="matrix float8", why="the device has none"),),
    seconds=61.0,
)


@pytest.fixture
def own_file(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def find(kind="cpu", count=COUNT, version=jax.__version__, **more):
    return find_calibration(kind, count, version, **more)


def test_it_is_kept_per_machine_kind_and_number_of_devices(own_cache, monkeypatch):
    monkeypatch.setattr(_calibration_file, "host_name", lambda: "Node 7.example")
    found = dataclasses.replace(
        FOUND, device_kind="NVIDIA H200", host="Node 7.example", device_count=8
    )
    path = save_calibration(found)
    folder = own_cache / "stowax" / "calibration"
    assert path == folder / "nvidia-h200-x8-node-7.example.json"
    assert [p.name for p in folder.iterdir()] == [path.name]  # nothing half-written
    assert find("NVIDIA H200", 8) == (found, None)
    assert find("NVIDIA H200", 4) == (None, None)
    assert find("NVIDIA H100", 8) == (None, None)
    monkeypatch.setattr(_calibration_file, "host_name", lambda: "other")
    assert find("NVIDIA H200", 8) == (None, None)


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/path"):  # neither is one, by the specification
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        path = calibration_path("cpu", 1)
        assert path.parent == tmp_path / ".cache" / "stowax" / "calibration"
    monkeypatch.setenv(VARIABLE, "~/mine.json")
    assert calibration_path("cpu", 1) == tmp_path / "mine.json"


def test_a_file_that_was_named_may_be_from_another_machine(own_file):
    other = dataclasses.replace(FOUND, host="elsewhere")
    save_calibration(other)
    assert find() == (other, None)
    assert find(processes=4) == (other, None)  # all of them read the same


def test_several_processes_do_not_plan_by_their_own_machines(own_cache):
    save_calibration(FOUND)
    found, note = find(processes=4)
    assert found is None
    assert "is one machine's, and 4 processes have to make the same plan" in note
    assert f"set {VARIABLE} to one file" in note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"device_kind": "TPU v5"},
            "is of 8 TPU v5 devices, and this process has 8 cpu",
        ),
        ({"device_count": 1}, "is of 1 cpu device, and this process has 8 cpu devices"),
        (
            {"versions": {"jax": "0.9.2"}},
            f"is of JAX 0.9.2, and this is {jax.__version__}",
        ),
        ({"versions": {}}, "is of JAX None"),
        ({"format": 2}, "it has format 2, and this stowax reads 1"),
        ({"format": None}, "it has no format"),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth is 'fast'"),
        ({"memory_bandwidth": 0.0}, "it has a rate that is none"),
        ({"matrix": {"int8": -1.0}}, "it has a rate that is none"),
        ({"device_count": 0}, "it is of no device"),
        ({"more": 1}, "more is not known"),
    ],
)
def test_what_cannot_be_used_is_said_and_planned_without(own_file, change, said):
    own_file.write_text(json.dumps({**FOUND.to_json(), **change}))
    found, note = find()
    assert found is None
    assert note.startswith(f"the calibration {str(own_file)!r} is not used: it ")
    assert said in note
    assert note.endswith("stowax calibrate measures again")
    there = stowax.target("cpu")
    assert there.notes == (note,)
    assert there.chip == CHIPS["cpu"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00", "null"])
def test_a_file_that_is_none_does_not_stop_a_plan(own_file, text):
    own_file.write_text(text)
    found, note = find()
    assert found is None
    assert "is not used" in note


def test_a_file_that_cannot_be_read_does_not_stop_a_plan(own_file):
    own_file.mkdir()
    found, note = find()
    assert found is None
    assert "cannot be read" in note


def test_where_nothing_can_be_written_it_says_so(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "c.json"))
    assert find() == (None, None)
    with pytest.raises(ArgumentError, match=f"Set {VARIABLE} to a file that can be"):
        save_calibration(FOUND)


def test_targets_and_plans_go_by_what_was_measured(own_file):
    before = stowax.target("cpu")
    save_calibration(FOUND)
    here = stowax.target("cpu")
    assert here.link == Link(device_to_host=4 * GB, host_to_device=5 * GB)
    assert here.link_range is None
    assert here.chip.key == before.chip.key == "cpu"
    assert here.device_bytes == before.device_bytes
    # What is measured is what programs reach: nothing is taken off it again.
    product = OperationCost(matrix_flops=(("float32", 2 * TERA),))
    assert seconds(product, here.chip) == pytest.approx(2 / 0.2)
    assert seconds(OperationCost(bytes_read=14 * GB), here.chip) == pytest.approx(2.0)
    loop = OperationCost(vector_flops=TERA)
    assert seconds(loop, here.chip) == pytest.approx(1 / 0.05)
    assert here.chip.host_rate() == 6 * GB
    measured, same_memory = here.notes
    assert measured == (
        f"rates are those measured on {host_name()}, 2026-11-21; not measured, and as "
        "quoted or assumed: matrix float8"
    )
    assert "device and host memory are the same here" in same_memory


def test_a_chip_of_two_devices_gets_the_figures_of_both():
    chip = CHIPS["7x"]
    here = calibrated(chip, dataclasses.replace(FOUND, one_memory=False))
    assert chip.devices_per_chip == 2
    assert here.memory_bandwidth.value == 2 * 7 * GB
    assert here.memory_reached() == 7 * GB
    assert here.sustained_out.value == 2 * 4 * GB
    assert dict(here.matrix)["float8"] == dict(chip.matrix)["float8"]  # not measured
    assert here.matrix_reached("float16") == 0.3 * TERA  # as bfloat16


def test_a_dtype_of_its_own_goes_before_one_like_it():
    found = dataclasses.replace(FOUND, matrix={**FOUND.matrix, "float16": 0.1 * TERA})
    assert calibrated(CHIPS["cpu"], found).matrix_reached("float16") == 0.1 * TERA


def test_a_link_that_both_directions_share_is_pointed_out():
    from stowax._hardware._calibrated import calibration_notes

    shared = dataclasses.replace(FOUND, one_memory=False, unmeasured=())
    assert shared.together == 3 / 4
    assert calibration_notes(shared)[1] == (
        "with both directions of the host link busy each has 3 GB/s, alone 4 out and 5 "
        "in; the model reckons with the latter, the schedule is simulated with both at "
        "once"
    )
    free = dataclasses.replace(
        shared, copies=(CopyRates(bytes=2**26, out=4 * GB, into=5 * GB, both=4 * GB),)
    )
    assert len(calibration_notes(free)) == 1
    turns = dataclasses.replace(
        shared, copies=(CopyRates(bytes=2**26, out=4 * GB, into=5 * GB, both=2 * GB),)
    )
    assert (free.duplex, shared.duplex, turns.duplex) == (True, True, False)
    assert calibration_notes(turns)[1].endswith("with one direction at a time")


def test_a_link_that_takes_turns_is_simulated_so(own_file):
    step = jax.jit(lambda x: x + 1.0)
    arguments = (jax.ShapeDtypeStruct((8,), "float32"),)
    for both, said in ((4, "both directions at once"), (2, "one direction at a time")):
        row = CopyRates(bytes=2**26, out=4 * GB, into=4 * GB, both=both * GB)
        save_calibration(dataclasses.replace(FOUND, copies=(row,)))
        found = stowax.inspect(step, *arguments, target="cpu")
        assumed = found.timeline.assumptions
        assert assumed[0] == f"link 4 GB/s out, 4 GB/s in, {said}"
        assert "roofline at the matrix throughput and the bandwidth measured" in assumed


def test_the_list_of_targets_has_both_figures(own_file):
    row = next(r for r in targets_table() if r.chip.key == "cpu")
    assert row.measured == ()
    assert "Nothing was measured here yet: stowax calibrate" in targets_text([row], 100)
    save_calibration(FOUND)
    row = next(r for r in targets_table() if r.chip.key == "cpu")
    lines = targets_text([row], 100).splitlines()
    quoted, here = (next(x for x in lines if w in x) for w in ("(attached)", "as meas"))
    assert quoted.split()[2:] == ["?", "20~", "0.1~", "10~", "10~", "?"]
    assert here.split()[3:] == ["7*", "0.3*", "4*", "5*"]
    text = " ".join(target_text(row, 120).split())
    assert "memory bandwidth 20 7 GB/s assumed" in text
    assert "matrix int8 ? 0.6 TFLOP/s" in text
    assert "cpu was measured on 2026-11-21, 8 devices at once" in text


def test_the_command_shows_it_as_data_and_as_text(own_file):
    save_calibration(FOUND)
    shown = CliRunner().invoke(main, ["targets", "cpu", "--json"])
    (row,) = json.loads(shown.stdout)
    assert calibration_of(row["measured"]["cpu"]) == FOUND
    shown = CliRunner().invoke(main, ["targets", "cpu"])
    assert "was measured on 2026-11-21" in shown.stdout


def test_a_calibration_prints_on_one_screen():
    text = calibration_text(FOUND, 80)
    assert text.splitlines()[0] == (
        f"cpu on {host_name()}: {COUNT} devices, all busy, rates of one"
    )
    assert "matrix int8" in text
    assert [line.split() for line in text.splitlines() if line.startswith("64.0")] == [
        ["64.0", "MiB", "4", "5", "3"]
    ]
    assert "matrix float8  the device has none" in text.splitlines()
    assert max(map(len, text.splitlines())) <= 80
