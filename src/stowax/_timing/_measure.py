"""One step as it really runs: `stowax.measure` records a profiler's trace of it.

The trace becomes a `Timeline`, of the same type as `Inspection.timeline`, so that what
was simulated and what happened stand side by side (`report.comparison_text`). Reading
the trace is `_xplane`'s and `_measured`'s work; here the step runs, without its
arguments coming to harm.

What goes silently wrong: a step that donates its arguments can run once. So every run
gets copies of what it donates, made before it and not measured with it, and what the
caller holds stays valid, whatever happens.
"""

import contextlib
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from .._errors import ArgumentError, TraceError
from .._files import scratch_folder
from .._hlo._program import read_program
from .._jax import argument_path
from .._records._program import Program
from .._records._timeline import Timeline
from .._units import format_bytes
from ._measured import timeline_of
from ._xplane import MARK, executions


def measure(
    step: Any, *args: Any, steps: int = 3, trace: str | pathlib.Path | None = None
) -> Timeline:
    """What one step takes on the attached device, from a profiler's trace.

    The step is run once to warm up, then `steps` times under `jax.profiler`, each time
    until its results are there. Arguments that it donates are copied for every run, in
    the memory where they lie: `args` stay valid, and nothing is trained. Where there is
    no room for the copies, record the training loop itself with `jax.profiler.trace`,
    and hand its folder in as `trace`: then nothing is run or copied.

    **Arguments:** `step` is what `jax.jit` or `plan.apply` returned, or a
    `jax.stages.Compiled`; `args` are its arguments, arrays, or with `trace` also
    `jax.ShapeDtypeStruct`s. `trace` is a folder that `jax.profiler.trace` wrote, or the
    `.xplane.pb` file in it.

    **Returns:** the `Timeline` of a step of median length, on the first device; its
    `origin` is `"measured"`. A CPU's has compute and collectives only.

    **Raises:** `ArgumentError` for arguments that cannot be run; `TraceError` where the
    trace has no device's lanes, or memory runs out; whatever the step raises.

    >>> step = jax.jit(lambda x: jnp.sin(x) @ x)
    >>> measure(step, jnp.ones((256, 256))).origin
    'measured'
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(
            "steps", f"{steps!r}", "Write a number of steps, 1 or more."
        )
    if trace is None:
        _check_arrays(args)
    compiled = _compiled(step, args)
    program = _program(compiled)
    if trace is None:
        with _scratch_folder() as folder:
            _record(step, compiled, args, steps, folder)
            profile = _profile(folder)
    else:
        profile = _profile(trace)
    device, runs = executions(profile, program)
    return timeline_of(runs, device)


def _scratch_folder() -> contextlib.AbstractContextManager[str]:
    try:
        return scratch_folder("stowax-measure-")
    except OSError as error:
        raise TraceError(
            "measure: JAX's profiler writes to a temporary folder, and none can be "
            f"made ({error.strerror}). Set TMPDIR to a folder that can be written to."
        ) from None


def _compiled(step: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
    if isinstance(step, jax.stages.Compiled):
        return step
    if not hasattr(step, "lower"):
        raise ArgumentError(
            "step", type(step).__name__, "Write stowax.measure(jax.jit(step), ...)."
        )
    return step.lower(*args).compile()


def _program(compiled: jax.stages.Compiled) -> Program:
    executable: Any = compiled.runtime_executable()
    return read_program(executable.hlo_modules()[0].as_serialized_hlo_module_proto())


def _check_arrays(args: tuple[Any, ...]) -> None:
    for path, leaf in jax.tree.leaves_with_path(args):
        where = argument_path(path)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ArgumentError(
                where,
                "a jax.ShapeDtypeStruct",
                "The step is run: pass arrays, or the trace of a run (trace=...).",
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ArgumentError(
                where,
                "an array that was deleted or donated",
                "Pass what the last step returned in its place.",
            )


def _record(
    step: Any, compiled: jax.stages.Compiled, args: tuple[Any, ...], steps: int, to: str
) -> None:
    """Runs the step `steps` times under the profiler, after once without."""
    info, _ = compiled.args_info
    # Compiled code takes no static arguments, and does not say which those are: then
    # the jitted function runs, at the price of compiling once more.
    run = compiled if len(info) == len(args) else step
    donated = _donated(info, args)
    jax.block_until_ready(run(*_fresh(args, donated)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with _profiling(to, options):
        for _ in range(steps):
            given = _fresh(args, donated)
            with jax.profiler.TraceAnnotation(MARK):
                jax.block_until_ready(run(*given))


def _donated(info: Any, args: tuple[Any, ...]) -> set[int]:
    """The flat positions of the arrays in `args` that a run destroys."""
    flags = [leaf.donated for leaf in jax.tree.leaves(info)]
    leaves = jax.tree.leaves(args)
    if len(flags) == len(leaves):
        return {i for i, donated in enumerate(flags) if donated}
    # With static arguments positions differ; to copy everything is always right.
    return set(range(len(leaves)) if any(flags) else ())


def _fresh(args: tuple[Any, ...], donated: set[int]) -> tuple[Any, ...]:
    """`args` with copies of what is donated, which are there when this returns."""
    leaves, structure = jax.tree.flatten(args)
    size = sum(getattr(leaves[i], "nbytes", 0) for i in donated)
    try:
        for i in donated:
            if isinstance(leaves[i], jax.Array):
                leaves[i] = jax.device_put(
                    leaves[i], leaves[i].sharding, may_alias=False
                )
        jax.block_until_ready([leaves[i] for i in donated])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TraceError(
            f"args: no memory is left for a copy of what the step donates "
            f"({format_bytes(size)}). They are unharmed. Record your training loop "
            "with jax.profiler.trace(folder), and write stowax.measure(step, *args, "
            "trace=folder)."
        ) from error
    return jax.tree.unflatten(structure, leaves)


@contextlib.contextmanager
def _profiling(folder: str, options: Any) -> Iterator[None]:
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise TraceError(
            f"trace: the profiler did not start: {error} End the other one first "
            "(jax.profiler.stop_trace), or hand its folder in as trace=..."
        ) from error
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            jax.profiler.stop_trace()


def _profile(trace: str | pathlib.Path) -> Any:
    path = pathlib.Path(trace)
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise ArgumentError(
            "trace",
            f"{str(trace)!r}, which has no .xplane.pb file",
            "Write the folder that was given to jax.profiler.trace.",
        )
    # A folder may have the traces of several recordings: their names are dates.
    try:
        return jax.profiler.ProfileData.from_serialized_xspace(files[-1].read_bytes())
    except Exception as error:
        raise ArgumentError(
            "trace",
            f"{str(files[-1])!r}, which is no trace ({error})",
            "Write the folder that was given to jax.profiler.trace.",
        ) from error
