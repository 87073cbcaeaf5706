"""Files that somebody changed: refused with a reason, or no more than a miss."""

import gzip
import json
import os

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import arguments, plan, train
from stowax._cli._inspect import _audit_of
from stowax._errors import ArgumentError
from stowax._jit._kept import Kept
from stowax._records._timeline import Interval
from stowax._survey import _options
from stowax._target._program_cache import ProgramCache

ARGS = arguments(width=64, rows=512)
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def moved():
    return plan(train, *ARGS, target="cpu", pin={"*": "recompute"})


@pytest.fixture
def load(moved, tmp_path):
    """Loads a plan in which something was changed."""

    def load(change, **options):
        data = json.loads(json.dumps(moved.to_json()))
        change(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        return stowax.load_plan(path, **options)

    return load


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["program"].update(target="cpu\nimport os"), "and not one line"),
        (lambda d: d["decisions"][0].update(dtype="f\ru"), "decisions.0.dtype is 'f"),
        (lambda d: d["decisions"][0].update(dtype="f\x85u"), "decisions.0.dtype is"),
        (lambda d: d["decisions"][0].update(shape=["1\n"]), "shape.0 is '1"),
        (lambda d: d["proof"].update(notes=["\x1b]0;mine\x07"]), "proof.notes.0 is"),
        (lambda d: d["proof"].update(notes=["\ud800"]), "proof.notes.0 is"),
        (lambda d: d["proof"].update(device_bytes=10**400), "device_bytes is 100"),
        (lambda d: d["proof"].update(step_seconds=10**400), "step_seconds is 100"),
        (lambda d: d["proof"].update(step_seconds=float("nan")), "step_seconds is nan"),
        (lambda d: d["program"].update(donate_argnums=[2**63]), "donate_argnums.0 is"),
        (lambda d: d["search"].update(binding=[1.5]), "search.binding.0 is 1.5"),
        (lambda d: d["program"]["options"].update(group=-1), "options.group is -1"),
        (lambda d: d["program"]["options"].update(tiles=-1), "options.tiles is -1"),
        (lambda d: d["program"]["stacks"][0].update(group=-1), "stacks.0.group is -1"),
        (lambda d: d["program"]["stacks"][0].update(count=0), "stacks.0.count is 0"),
    ],
)
def test_what_no_plan_says_is_refused_where_it_stands(load, change, said):
    with pytest.raises(ArgumentError, match="which is no whole plan") as caught:
        load(change)
    assert said in str(caught.value)


def test_a_compiler_option_from_a_file_is_stowaxs_own_or_said_again(load, tmp_path):
    dump = {"xla_dump_to": str(tmp_path / "dump")}

    def evil(data):
        data["program"]["compiler_options"] = dump

    with pytest.raises(ArgumentError) as caught:
        load(evil)
    assert str(caught.value) == (
        f"path: got {str(tmp_path / 'plan.json')!r}, a plan with the compiler option "
        f"'xla_dump_to' = {str(tmp_path / 'dump')!r:.60}, which is none of stowax's "
        "own. Use no plan of somebody you do not trust. Options that you gave to "
        "stowax.plan are given again: stowax.load_plan(path, compiler_options={...})."
    )
    with pytest.raises(ArgumentError, match="none of stowax's own"):
        load(evil, compiler_options={"xla_dump_to": "elsewhere"})
    assert load(evil, compiler_options=dump).program.compiler_options == dump
    # Not the name alone: another value of the same option may leave passes out.
    passes = {"xla_disable_hlo_passes": "rematerialization"}
    load(lambda d: d["program"].update(compiler_options=passes))
    passes = {"xla_disable_hlo_passes": "offload-copy-insertion"}
    with pytest.raises(ArgumentError, match="none of stowax's own"):
        load(lambda d: d["program"].update(compiler_options=passes))


@pytest.mark.parametrize(
    "target", ["cpu", "h200", "h200x8", "v5e-4", "v5p-8", "v6e-8", "v4-8"]
)
def test_options_of_every_plan_are_known_as_stowaxs_own(target):
    there = stowax.target(target)
    for offloads in (False, True):
        for sparing in (False, True):
            options = _options.plan_options(there, offloads, sparing=sparing)
            options |= _options.more_fast_memory(there)
            for found in (options, *_options.alternatives(there, options)):
                assert all(_options.is_own_option(*item) for item in found.items())


@pytest.mark.parametrize("text", [DEEP, '{"version": 1, "timeline": ' + DEEP + "}"])
def test_text_that_is_nested_too_deep_is_refused(tmp_path, monkeypatch, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    for load in (
        stowax.load_plan,
        stowax.load_inspection,
        lambda path: _audit_of(path, "page.html"),
    ):
        with pytest.raises(ArgumentError, match="nested too deep"):
            load(path)
    monkeypatch.setenv("STOWAX_CALIBRATION", str(path))
    assert "nested too deep" in " ".join(stowax.target("cpu").notes)


def lowered():
    there = stowax.target("h200")
    return there.lower(
        jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    )


def test_a_program_that_was_changed_is_compiled_again(tmp_path):
    cache, there, mine = ProgramCache(tmp_path), stowax.target("h200"), lowered()
    honest = cache.compiled(mine, {}, there)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    digest, head, module = gzip.decompress(whole).split(b"\n", 2)
    note = json.loads(head)
    note["memory"]["temp_size_in_bytes"] = 1
    for lines in (
        (digest, json.dumps(note).encode(), module),
        (digest, head, module[: len(module) // 2]),
        (digest, b"[]", module),
        (head, module),
    ):
        path.write_bytes(gzip.compress(b"\n".join(lines)))
        assert cache.read(honest.key) is None
    # One program's file in the place of another's.
    path.write_bytes(whole)
    path.rename(tmp_path / "other.gz")
    assert cache.read("other") is None
    os.mkfifo(path)
    assert cache.read(honest.key) is None
    assert not cache.compiled(mine, {}, there).was_kept
    assert cache.compiled(mine, {}, there).was_kept


def test_a_folder_that_cannot_be_written_ends_no_planning(tmp_path, monkeypatch):
    cache, there, mine = ProgramCache(tmp_path), stowax.target("h200"), lowered()
    cache.compiled(mine, {}, there)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()  # in the file's place
    with pytest.warns(UserWarning, match="programs are compiled, and not kept"):
        found = cache.compiled(mine, {}, there)
    assert (found.was_kept, found.memory.argument_size_in_bytes) == (False, 256)


def test_a_kept_plan_that_was_changed_is_no_plan(tmp_path, moved):
    kept = Kept.within(tmp_path)
    kept.write("key", moved)
    assert kept.read("key", {}) == moved
    (path,) = (tmp_path / "plans").iterdir()
    data = json.loads(path.read_text())
    data["proof"]["fits"] = not data["proof"]["fits"]
    path.write_text(json.dumps(data))
    assert kept.read("key", {}) is None
    path.unlink()
    os.mkfifo(path)
    assert kept.read("key", {}) is None
    kept.write("key", moved)
    assert kept.read("key", {}) == moved
    assert kept.read("another", {}) is None


def test_loops_of_an_inspection_are_counted_one_by_one():
    many = Interval(lane="compute", name="x", start=0.0, end=1.0, count=2**60)
    assert next(many.starts()) == 0.0
    two = Interval(
        lane="compute",
        name="x",
        start=1.0,
        end=1.5,
        count=6,
        period=1.0,
        around=((2, 10.0),),
    )
    assert [*two.starts()] == [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]
