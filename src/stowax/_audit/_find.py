"""From what was seen to what is wrong: every kind of finding, in one list; no JAX."""

from collections.abc import Iterable

from .._records._audit import AUDIT_KINDS, AuditRecord, Finding, Recording
from . import _memory, _programs, _transfers
from ._staging import staging, staging_note
from ._steps import Steps, steps_of


def findings_of(recording: Recording) -> AuditRecord:
    """What is wrong with the loop that was recorded, the costliest first."""
    steps = steps_of(recording.events)
    found: list[Finding] = [
        *_programs.donations(recording, steps),
        *_programs.recompilations(steps),
    ]
    if steps.count > 1:
        found += _transfers.sent_values(steps)
        found += _transfers.moves(steps)
        found += _transfers.many(steps)
        found += _transfers.reads(steps)
        found += _programs.operations(steps)
        found += _programs.from_programs(recording.facts, steps, recording.enough_bytes)
        found += _memory.growth(recording, steps)
        found += _memory.starvation(recording.samples, steps)
    seconds, staged = steps.seconds, staging(recording, steps)
    return AuditRecord(
        findings=tuple(_once(found)),
        steps=steps.count,
        step_file=steps.place.file,
        step_line=steps.place.line,
        transfers=_transfers.transfers_a_step(steps),
        step_seconds=sum(seconds) / len(seconds) if seconds else 0.0,
        staged_bytes=staged.bytes if staged else 0,
        notes=tuple(_notes(recording, steps)),
    )


def _once(found: Iterable[Finding]) -> list[Finding]:
    """One finding for one cause: what several small reads are is said by the first."""
    order = list(AUDIT_KINDS)
    several = {(f.file, f.line) for f in found if f.kind == "many-transfers"}
    kept = [
        f
        for f in found
        if f.kind != "host-read" or f.count < 2 or (f.file, f.line) not in several
    ]
    return sorted(
        dict.fromkeys(kept),
        key=lambda f: (-f.seconds, -f.bytes, order.index(f.kind), f.file, f.line),
    )


def _notes(recording: Recording, steps: Steps) -> Iterable[str]:
    if recording.failed:
        yield f"The audit ended early, by a mistake of its own: {recording.failed}"
    if not recording.events:
        yield "No jitted function was called, nor anything else of JAX's."
    elif not any(event.what == "call" for event in recording.events):
        yield "No jitted function was called: everything was dispatched one by one."
    if recording.passed_by:
        yield (
            f"Another {recording.passed_by} steps were passed by, to keep the loop's "
            "pace."
        )
    if note := staging_note(recording, steps):
        yield note
    if steps.count < 2:
        yield "No loop was seen: what happens in every step takes two steps to see."
