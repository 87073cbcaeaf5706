"""Programs in a folder: compiled once, never mistaken for one another."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

import stowax
from plan_parts import changed
from planned_models import QUICK, arguments, bytes_of, plan, train
from stowax import _jax_targets
from stowax._errors import ArgumentError, OutOfMemoryCompileError
from stowax._hlo._program import read_program
from stowax._target._compiled import LoweredProgram
from stowax._target._program_cache import ProgramCache, cache_in

ARGS = arguments(rows=1024)
BUDGET = bytes_of(ARGS) + 40 * 2**20
OPTIONS = {"budget": BUDGET}


def lowered(function=lambda x: x + 1, rows=8, target="h200"):
    there = stowax.target(target)
    return there.lower(jax.jit(function), jax.ShapeDtypeStruct((rows, 8), jnp.float32))


@pytest.fixture
def compiles(monkeypatch):
    """What was compiled since."""
    seen, compile_it = [], LoweredProgram.compile

    def compile_and_note(self, options=None, **more):
        seen.append(options)
        return compile_it(self, options, **more)

    monkeypatch.setattr(LoweredProgram, "compile", compile_and_note)
    return seen


def without_seconds(found):
    """A plan without what depends on the day."""
    trials = [
        dataclasses.replace(t, seconds_to_compile=0.0) for t in found.search.trials
    ]
    written = found.search.written
    if written is not None:
        written = dataclasses.replace(written, seconds_to_compile=0.0)
    return changed(
        found,
        planning_seconds=0.0,
        solving_seconds=0.0,
        trials=tuple(trials),
        written=written,
    )


@pytest.mark.slow
def test_what_is_planned_again_compiles_nothing_and_is_the_same(tmp_path, compiles):
    lines = []
    first = plan(train, *ARGS, cache=tmp_path, progress=lines.append, **OPTIONS)
    assert any("compiled in" in line for line in lines)
    assert len(compiles) == len(first.search.trials) > 0
    assert len(list(tmp_path.iterdir())) == len(first.search.trials)
    compiles.clear()
    lines.clear()
    again = plan(train, *ARGS, cache=str(tmp_path), progress=lines.append, **OPTIONS)
    assert compiles == []
    assert any("read from the cache: " in line for line in lines)
    assert not any("compiled in" in line for line in lines)
    assert without_seconds(again) == without_seconds(first)
    apart = plan(train, *ARGS, **OPTIONS)
    assert len(compiles) == len(apart.search.trials)
    assert without_seconds(apart) == without_seconds(first)


def test_options_flags_devices_names_and_programs_tell_programs_apart(
    tmp_path, compiles, monkeypatch
):
    cache, there = ProgramCache(tmp_path), stowax.target("h200")
    same = lowered()
    cache.compiled(same, {}, there)
    cache.compiled(lowered(), {}, there)
    assert len(compiles) == 1

    def renamed(x):
        with jax.named_scope("stowax.offload.here"):
            return x + 1

    cache.compiled(lowered(rows=16), {}, there)
    cache.compiled(lowered(renamed), {}, there)
    cache.compiled(same, {"xla_gpu_enable_triton_gemm": False}, there)
    other = stowax.target("a100-80")
    cache.compiled(lowered(target="a100-80"), {}, other)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_nccl_comm_splitting=false")
    cache.compiled(same, {}, there)
    assert len(compiles) == 6
    before = jax.config.values["jax_disable_most_optimizations"]
    try:
        jax.config.update("jax_disable_most_optimizations", not before)
        cache.compiled(same, {}, there)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert len(compiles) == 7


def test_figures_and_module_are_those_of_the_compiler(tmp_path):
    there, mine = stowax.target("h200"), lowered()
    direct = mine.compile()
    for _ in range(2):
        found = ProgramCache(tmp_path).compiled(mine, {}, there)
        analysis = direct.memory_analysis()
        for name in ("argument", "output", "alias", "temp"):
            for prefix in ("", "host_"):
                field = f"{prefix}{name}_size_in_bytes"
                assert getattr(found.memory, field) == getattr(analysis, field)
        assert found.memory.argument_size_in_bytes == 8 * 8 * 4
        assert read_program(found.module) == read_program(direct.hlo_module_protos()[0])


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_a_damaged_file_is_compiled_again(tmp_path, compiles, damage):
    cache, there = ProgramCache(tmp_path), stowax.target("h200")
    cache.compiled(lowered(), {}, there)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    compiled = cache.compiled(lowered(), {}, there)
    assert len(compiles) == 2
    assert cache.compiled(lowered(), {}, there).module == compiled.module
    assert len(compiles) == 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not _jax_targets.has_libtpu(), reason="no libtpu installed")
def test_a_refusal_for_size_is_remembered_with_its_figures(tmp_path, compiles):
    there = stowax.target("v5e-1")
    spec = jax.ShapeDtypeStruct((2**38 // (1024 * 4), 1024), jnp.float32)
    mine = there.lower(jax.jit(lambda x: x + 1), spec)
    first = ProgramCache(tmp_path).compiled(mine, QUICK, there)
    again = ProgramCache(tmp_path).compiled(mine, QUICK, there)
    assert len(compiles) == 1
    assert (again.key, again.seconds) == (first.key, first.seconds)
    assert (first.was_kept, again.was_kept) == (False, True)
    for found in (first, again):
        assert (found.module, found.memory) == (b"", None)
        assert isinstance(found.refusal, OutOfMemoryCompileError)
        assert found.refusal.needed_bytes == 2 * 2**38
    assert str(again.refusal) == str(first.refusal)


def test_a_folder_is_made_where_there_is_none(tmp_path):
    folder = tmp_path / "not" / "yet"
    assert cache_in(folder).folder == folder
    assert folder.is_dir()
    assert cache_in(None).folder is None


def test_what_is_no_folder_is_refused_before_any_work(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ArgumentError) as caught:
        plan(train, *ARGS, cache=path)
    assert str(caught.value) == (
        f"cache: got {os.fspath(path)!r}, which is no folder and cannot be made one "
        "(File exists). Write the path of a folder that may be written to."
    )
    with pytest.raises(ArgumentError) as caught:
        plan(train, *ARGS, cache=3)
    assert str(caught.value) == (
        "cache: got 3. Write the path of a folder, or leave it out."
    )
