"""Findings about memory that grows, and time spent on waiting for input; no JAX."""

from collections import defaultdict
from collections.abc import Iterator

from .._records._audit import Finding, Recording, Sample
from .._units import format_bytes
from .._where import Place
from ._steps import Steps
from ._transfers import finding

_FEW_STEPS = 4
# A few scalars a step are a history of losses.
_SMALL_BYTES = 4096
# Below both, waiting is what any loop in Python does between two calls.
_STARVED_SECONDS, _STARVED_SHARE = 1e-3, 0.2
# What allocators and caches do by themselves is over, and less.
_SETTLED_STEPS, _UNEXPLAINED_BYTES = 12, 1 << 20


def growth(recording: Recording, steps: Steps) -> Iterator[Finding]:
    """What is made in every step and kept: arrays, host memory, and the process's."""
    process = process_growth(recording, steps)
    beside = (
        f"; the process grows by {format_bytes(process)} a step"
        if process >= _SMALL_BYTES
        else ""
    )
    explained, places = 0, set()
    for place, size, count, made_in in _kept_arrays(recording, steps):
        explained += size
        places.add(place[:2])
        yield finding(
            "growing-memory",
            place,
            f"{format_bytes(size)} that this line makes in a step are still alive "
            f"at the end, of {made_in} steps{beside}",
            "Keep numbers instead of arrays (a running mean on the device), or "
            "bring old ones to the host every so many steps: jax.device_get(...).",
            count=count,
            bytes=size,
        )
    for place, size in recording.grown:
        if place[:2] not in places:
            explained += size
            places.add(place[:2])
            yield finding(
                "growing-memory",
                place,
                f"{format_bytes(size)} of host memory that this line allocates in a "
                f"step are kept{beside}",
                "Keep what is needed of it, in one array that is filled, or write it "
                "to a file.",
                count=1,
                bytes=size,
            )
    left = 0 if _compiles_on(steps) else process - explained
    if steps.count >= _SETTLED_STEPS and left >= max(_UNEXPLAINED_BYTES, explained):
        yield finding(
            "growing-memory",
            steps.place,
            f"the process grows by {format_bytes(process)} a step, of which arrays and "
            f"what Python allocates explain {format_bytes(explained)}",
            "A library keeps memory in every step: look at what the loop calls "
            "besides JAX, such as loaders, loggers and their caches.",
            count=1,
            bytes=left,
        )


def _compiles_on(steps: Steps) -> bool:
    """Whether most steps compile something: programs are kept, and that is told."""
    return steps.is_regular(n for n, _, event in steps.inside() if event.changed)


def process_growth(recording: Recording, steps: Steps) -> int:
    """Bytes a step by which the process grows, steadily, in the later half; or 0."""
    sizes = {reading.event: reading.bytes for reading in recording.resident}
    pairs = [(sizes.get(a, 0), sizes.get(b, 0)) for a, b in steps.consecutive]
    later = pairs[len(pairs) // 2 :]
    if len(pairs) < _FEW_STEPS - 1 or not all(map(all, later)):
        return 0
    growing = sum(after > before for before, after in later)
    if growing < 0.8 * len(later):
        return 0
    return max(0, sum(after - before for before, after in later) // len(later))


def _kept_arrays(
    recording: Recording, steps: Steps
) -> Iterator[tuple[Place, int, float, int]]:
    """Lines whose arrays of all steps are alive at the end: bytes, how many, of when.

    **Returns:** place, bytes a step, arrays a step, number of steps.
    """
    found: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for array in recording.alive:
        event = steps.events[array.event]
        step = steps.step_of(array.event)
        if step >= 0:
            found[event.place].append((step, array.bytes))
    for place, pairs in found.items():
        made_in = {step for step, _ in pairs}
        size = round(sum(size for _, size in pairs) / max(len(made_in), 1))
        many = len(made_in) >= max(_FEW_STEPS, 0.8 * (steps.count - 1))
        if many and size >= _SMALL_BYTES:
            yield place, size, len(pairs) / len(made_in), len(made_in)


def starvation(samples: tuple[Sample, ...], steps: Steps) -> Iterator[Finding]:
    """Lines of the loop on which the device is idle and the program not in JAX."""
    moments = [steps.events[start].at for start in steps.starts]
    durations = steps.seconds
    if len(durations) < 2:
        return
    span = sum(durations)
    calls = {event.place[:2] for _, _, event in steps.inside() if event.what == "call"}
    found: dict[Place, list[Sample]] = defaultdict(list)
    for sample in samples:
        # A library's work around the call, such as taking a model apart, is no input.
        if sample.places[0][:2] in calls or sample.thread != steps.thread:
            continue
        if moments[0] <= sample.at <= moments[-1]:
            for place in sample.places:
                if place[2:] == steps.place[2:] and place.file == steps.place.file:
                    found[place].append(sample)
                    break
    for place, group in found.items():
        seconds = sum(sample.seconds for sample in group)
        each = seconds / len(durations)
        steps_hit = {sum(moment <= sample.at for moment in moments) for sample in group}
        regular = 2 * len(steps_hit) >= len(durations)
        if regular and each >= _STARVED_SECONDS and seconds >= _STARVED_SHARE * span:
            yield finding(
                "starved-device",
                place,
                f"the device is idle while this line runs, {seconds / span:.0%} of the "
                "time",
                "Load and place batches ahead of use: for batch in "
                "stowax.prefetch(batches): …",
                count=1,
                seconds=each,
            )
