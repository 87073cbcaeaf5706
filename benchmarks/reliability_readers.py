"""Every kind of file that stowax reads: a whole one, and what is done with it.

A reader gets the path of a damaged file and uses what it reads as a person would: it
prints it, makes its page, traces or runs its plan. What it returns says what became of
the file; `WrongNumbersError` is a damage that nobody noticed.
"""

import ast
import dataclasses
import json
import os
import pathlib
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

import stowax
from benchmarks.models import reliable
from stowax import report
from stowax._cli._inspect import _audit_of
from stowax._jit._kept import Kept
from stowax._records._calibration import CalibrationRecord, CopyRates
from stowax._target._calibration_file import VARIABLE, host_name
from stowax._target._program_cache import ProgramCache

ONE_OF = 20
"""Of so many accepted files one is used at length: its plan runs, its page is made."""

Outcome = Literal["used", "run", "missed"]
Read = Callable[[pathlib.Path, random.Random], Outcome]

ROWS, WIDTH = 64, 16


class WrongNumbersError(Exception):
    """A damaged file was accepted, and gave something else than it should."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: a whole one, its name below a folder, and how it is read."""

    name: str
    whole: bytes
    read: Read


def _arguments() -> Any:
    return (*reliable.initial(WIDTH), reliable.batch(0, ROWS, WIDTH))


def _plan() -> stowax.Plan:
    return stowax.plan(
        reliable.train_step,
        *_arguments(),
        target="cpu",
        pin={"*tanh*": "recompute"},
        progress=False,
    )


def plans() -> Kind:
    """Plan files: printed, written as code, traced; one of 20 runs."""
    step, args = reliable.train_step, _arguments()
    expected = jax.tree.leaves(jax.jit(step)(*args))

    def read(path: pathlib.Path, draw: random.Random) -> Outcome:
        found = stowax.load_plan(path)
        ast.parse(found.as_code())
        str(found).encode()
        report.plan_html(found).encode()
        # What is donated is gone: the step gets copies.
        placed = found.place(*jax.tree.map(lambda a: jax.numpy.array(a), args))
        planned = found.apply(step)
        if draw.randrange(ONE_OF):
            planned.trace(*placed)
            return "used"
        got = jax.tree.leaves(planned(*placed))
        for mine, theirs in zip(got, expected, strict=True):
            if not np.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                raise WrongNumbersError("a plan gave other numbers")
        return "run"

    return Kind("plan.json", _plan().to_text().encode(), read)


def kept_plans() -> Kind:
    """Plans that `stowax.jit` keeps: what is not as it was written is none."""
    plan = _plan()
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(pathlib.Path(folder))
        kept.write("key", plan)
        (path,) = pathlib.Path(folder).iterdir()
        name, whole = path.name, path.read_bytes()

    def read(path: pathlib.Path, _: random.Random) -> Outcome:
        found = Kept(path.parent).read("key", {})
        if found is None:
            return "missed"
        if found != plan:
            raise WrongNumbersError("another plan was read than was kept")
        return "used"

    return Kind(name, whole, read)


def programs() -> Kind:
    """Entries of the cache of compiled programs (`cache=`)."""
    target = stowax.target("cpu")
    step, args = jax.jit(reliable.train_step), _arguments()
    with tempfile.TemporaryDirectory() as folder:
        cache = ProgramCache(pathlib.Path(folder))
        honest = cache.compiled(target.lower(step, *args), {}, target)
        (path,) = pathlib.Path(folder).iterdir()
        name, whole = path.name, path.read_bytes()

    def read(path: pathlib.Path, _: random.Random) -> Outcome:
        found = ProgramCache(path.parent).read(path.stem)
        if found is None:
            return "missed"
        if (found.module, found.seconds) != (honest.module, honest.seconds):
            raise WrongNumbersError("another program was read than was kept")
        return "used"

    return Kind(name, whole, read)


def calibrations() -> Kind:
    """What `stowax calibrate` keeps: read whenever a machine is looked at."""
    gb, device = 10**9, jax.devices()[0]
    record = CalibrationRecord(
        device_kind=device.device_kind,
        platform=device.platform,
        host=host_name(),
        device_count=len(jax.devices()),
        date="2026-11-27T12:00:00+00:00",
        versions={"jax": jax.__version__, "stowax": "0.1.0"},
        matrix={"bfloat16": 300.0 * gb, "float32": 200.0 * gb},
        memory_bandwidth=7.0 * gb,
        vector=50.0 * gb,
        copies=(
            CopyRates(bytes=2**20, out=1.0 * gb, into=2.0 * gb, both=1.0 * gb),
            CopyRates(bytes=2**26, out=4.0 * gb, into=5.0 * gb, both=3.0 * gb),
        ),
        host_update=6.0 * gb,
        host_update_by="these devices",
        one_memory=True,
        unmeasured=(),
        seconds=60.0,
    )

    def read(path: pathlib.Path, _: random.Random) -> Outcome:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(path)
        try:
            target = stowax.target("cpu")
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before
        "\n".join(target.notes).encode()
        return "missed" if any("is not used" in n for n in target.notes) else "used"

    text = json.dumps(record.to_json(), indent=1)
    return Kind("calibration.json", text.encode(), read)


def inspections() -> Kind:
    """Saved inspections: shown, compared; one of 20 becomes a page and a trace."""
    whole = stowax.inspect(jax.jit(reliable.train_step), *_arguments(), target="cpu")

    def read(path: pathlib.Path, draw: random.Random) -> Outcome:
        found = stowax.load_inspection(path)
        report.inspection_text(found).encode()
        report.differences_text(whole, found, ("a", "b")).encode()
        found.to_json()
        if draw.randrange(ONE_OF):
            return "used"
        found.to_html(path.with_name("page.html"))
        found.timeline.to_perfetto(path.with_name("trace.json"))
        report.differences_page(found, whole, ("a", "b")).encode()
        return "run"

    return Kind("inspection.json", whole.to_json().encode(), read)


def audits() -> Kind:
    """Saved audits, which `stowax inspect --audit` shows on its page."""
    step, (params, state, x) = jax.jit(reliable.train_step), _arguments()
    with stowax.audit() as audit:
        for _ in range(5):
            params, state, loss = step(params, state, x)
            float(loss)
    whole = json.dumps(audit.record.to_json(), indent=1)

    def read(path: pathlib.Path, _: random.Random) -> Outcome:
        report.audit_page(_audit_of(str(path), "page.html")).encode()
        return "used"

    return Kind("audit.json", whole.encode(), read)


def traces() -> Kind:
    """Traces of JAX's profiler, which `stowax.measure(trace=)` reads."""
    args = _arguments()
    compiled = jax.jit(reliable.train_step).lower(*args).compile()
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with jax.profiler.trace(folder):
                for _ in range(3):
                    jax.block_until_ready(compiled(*args))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        whole = path.read_bytes()

    def read(path: pathlib.Path, _: random.Random) -> Outcome:
        str(stowax.measure(compiled, trace=path)).encode()
        return "used"

    return Kind("host.xplane.pb", whole, read)


KINDS: dict[str, Callable[[], Kind]] = {
    "plan": plans,
    "kept plan": kept_plans,
    "program": programs,
    "calibration": calibrations,
    "inspection": inspections,
    "audit": audits,
    "trace": traces,
}
