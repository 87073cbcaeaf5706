"""A plan on one screen: does it fit, how fast, against what, what moves, and why.

`print(plan)` and `stowax plan` show it. Compiled figures are facts and predicted ones
are opinions, so they stand in rows of their own: the hand-written policies are
predictions and are compared with this plan's prediction, never with its compiled row.
"""

import textwrap
from collections.abc import Iterable, Sequence

from .._hardware._pinned import VARIABLE
from .._records._plan import Baseline, PinPrice, PlanRecord, ProofRecord, SearchRecord
from .._units import format_bytes, format_seconds
from ._decisions_text import decision_lines, stack_titles
from ._layout import Align, count_of, cut, facts, lines_of, or_dash, table, text_width
from ._peak_text import arrays_text, known_size, peak_title
from ._written_text import (
    against_written,
    compiled_row,
    foreseen_row,
    unlike_keep_all,
    yes_or_no,
)

SCREEN = 42
"""Lines of a plan, where the number of stacks lets it: one screen."""

_MOST_BASELINES = 9  # two fewer for every stack: together they share a screen
_ALL_COLUMNS = 80  # narrower, a column fewer is better than figures cut short
_LONGEST_NAME = 20  # of a policy, where the table has no room to spare
_MOST_IN_THE_WAY = 6
_MOST_EXPLAINED = 0.9  # of a program's bytes: below, its arrays do not explain it
_UNITS = {"1 GiB": 2**30, "1 MiB": 2**20, "64 KiB": 2**16}
_WORTH_SAYING = 1e-4  # of the step's time: less than 0.01 % prints as nothing


def plan_text(record: PlanRecord, width: int | None = None) -> str:
    """The plan as text of at most `width` columns.

    **Arguments:** `width` in columns, by default the terminal's (80 where there is
    none); kept between 60 and 160.

    **Returns:** about one screen of lines, without colour codes.

    >>> print(plan_text(plan, width=80))  # doctest: +SKIP
    """
    columns = text_width(width)
    top = [*_headline(record, columns), "", *_comparison(record, columns)]
    bottom = [*_in_the_way(record, columns), *facts(_certificate(record), columns)]
    room = SCREEN - len(top) - len(bottom) - 2
    middle = decision_lines(record, columns, room)
    parts = [part for part in (top, middle, bottom) if part]
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(record: PlanRecord, width: int) -> list[str]:
    # A target that is not there has stand-ins for devices, whose kind says nothing.
    program, host_budget = record.program, record.proof.host_budget_bytes
    kind = "compile-only" if program.compile_only else program.device_kind
    step = program.step.rpartition("<locals>.")[2]
    kept = record.proof.host_reserve_bytes
    reserve = f" beside {format_bytes(kept)} in reserve" if kept else ""
    budget = format_bytes(record.budget_bytes)
    used = format_bytes(record.device_bytes)
    if record.fits and record.outcome == "unneeded":
        verdict = f"FITS as it is: {used} of {budget} per device. Nothing moves."
    elif record.fits:
        share = record.device_bytes / max(record.budget_bytes, 1)
        verdict = (
            f"FITS: {used} of {budget} per device ({share:.0%}), "
            f"{_OUTCOMES[record.outcome]}."
        )
    elif record.host_bytes > host_budget:
        verdict = (
            f"DOES NOT FIT: {format_bytes(record.host_bytes)} of host memory per "
            f"device, host budget {format_bytes(host_budget)}{reserve}."
        )
    elif record.outcome == "infeasible":
        wishes = record.pins or record.search.forbid
        allowed = " that the pins and forbids allow" if wishes else ""
        least = "decisions below need" if record.decisions else "step as it is needs"
        verdict = (
            f"DOES NOT FIT {budget} per device: no plan{allowed} is known to fit. Of "
            f"what was compiled, the {least} the least."
        )
    else:
        verdict = f"DOES NOT FIT: compiled {used} per device, budget {budget}."
    text = [f"stowax plan for {step} on {record.target} ({kind})", verdict]
    if record.fits and record.outcome != "unneeded":
        text += [against_written(record), _against_baselines(record)]
    return [line for part in text if part for line in lines_of(part, width)]


_OUTCOMES = {
    "optimal": "optimal under the model",
    "feasible": "the best of what was tried",
    "infeasible": "although the model said that nothing fits",
}


def _against_baselines(record: PlanRecord) -> str:
    if not record.baselines or not record.search.model_seconds:
        return ""
    fitting = [b for b in record.baselines if b.fits]
    if not fitting:
        return "No hand-written policy fits this budget."
    best = min(fitting, key=lambda b: b.seconds)
    change = best.seconds / record.search.model_seconds - 1  # as in the table
    if abs(change) < 0.0005:
        return f"As fast as '{best.name}', the fastest hand-written policy that fits."
    longer = "longer" if change > 0 else "less time"
    return (
        f"'{best.name}', the fastest hand-written policy that fits, is predicted to "
        f"take {abs(change):.1%} {longer}."
    )


_HEADERS = ("  per device", "device", "host", "step time", "vs predicted", "fits")
_SIDES: Sequence[Align] = ("left", "right", "right", "right", "right", "left")


def _comparison(record: PlanRecord, width: int) -> list[str]:
    moved = [d for d in record.decisions if d.decision == "offload"]
    offloaded = sum(d.bytes * d.count for d in moved)
    model = record.search.model_seconds
    rows = [
        (
            "▸ this plan, compiled",
            or_dash(format_bytes, record.device_bytes),
            or_dash(format_bytes, record.host_bytes),
            or_dash(format_seconds, record.step_seconds),
            "",
            yes_or_no(record.fits),
        ),
        *compiled_row(record),
        (
            "▸ this plan, predicted",
            or_dash(format_bytes, record.predicted_device_bytes),
            or_dash(format_bytes, offloaded),
            or_dash(format_seconds, model),
            "",
            yes_or_no(record.predicted_device_bytes <= record.budget_bytes),
        ),
        *foreseen_row(record),
    ]
    ordered = sorted(_unlike(record.baselines), key=lambda b: (not b.fits, b.seconds))
    if record.outcome == "unneeded":
        ordered = []  # their "keep all" stores more than the step as it is written
    most = max(3, _MOST_BASELINES - 2 * len(record.program.stacks))
    rows += [_baseline_row(b, model, width) for b in ordered[:most]]
    left_out = set() if ordered else {"vs predicted"}
    if width < _ALL_COLUMNS:
        left_out |= {"host", "vs predicted"}
    lines = lines_of(table(_HEADERS, rows, _SIDES, without=left_out), width)
    if (more := len(ordered) - most) > 0:
        lines.append(f"  and {count_of(more, 'policy')} slower or larger")
    if record.step_seconds and model:
        others = "all others" if ordered else "predicted"
        # Else "keep all" would be taken for the step as it is written.
        run = ""
        if ordered and not record.decisions:
            run = "; policies run layers as loops or segments, not as written"
        elif ordered and any(stack.group for stack in record.program.stacks):
            run = "; policies run layers in groups, too"
        elif ordered and unlike_keep_all(record.search):
            run = (
                "; policies, keep all too, run layers as the plan does, not as written"
            )
        lines += textwrap.wrap(
            f"step time: compiled is simulated from XLA's schedule, {others} the "
            f"model's{run}",
            width,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    return lines


def _unlike(baselines: Sequence[Baseline]) -> list[Baseline]:
    """The first of those with the same figures: without a host to offload to, say."""
    first: dict[tuple[int, int, float], Baseline] = {}
    for one in baselines:
        first.setdefault((one.device_bytes, one.host_bytes, one.seconds), one)
    return list(first.values())


def _baseline_row(baseline: Baseline, model: float, width: int) -> tuple[str, ...]:
    change = f"{baseline.seconds / model - 1:+.1%}" if model else ""
    return (
        f"  {cut(baseline.name, max(_LONGEST_NAME, width // 4))}",
        or_dash(format_bytes, baseline.device_bytes),
        or_dash(format_bytes, baseline.host_bytes),
        or_dash(format_seconds, baseline.seconds),
        change,
        yes_or_no(baseline.fits),
    )


def _in_the_way(record: PlanRecord, width: int) -> list[str]:
    """The arrays at the peak of a plan's program that does not fit the device."""
    proof = record.proof
    short_of_host = proof.host_bytes > proof.host_budget_bytes
    if proof.peak is None or short_of_host:
        return []
    title = peak_title(proof.peak)
    if proof.peak.bytes < _MOST_EXPLAINED * proof.device_bytes:
        title += (
            f". The compiled program needs {format_bytes(proof.device_bytes)}: what "
            "the compiler makes beyond the prediction is not below"
        )
    return [
        *lines_of(title, width),
        *arrays_text(proof.peak, width, _MOST_IN_THE_WAY),
        "",
    ]


def _certificate(record: PlanRecord) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    proof, search = record.proof, record.search
    moves = search.outcome != "unneeded"
    short_of_host = proof.host_bytes > proof.host_budget_bytes
    if not proof.fits and search.smallest_budget and not short_of_host:
        pairs.append(("it takes", smallest_text(search)))
        # The arrays stand above, but no reason why state stays.
        way, label = proof.in_the_way, "in the way"
        if proof.peak is not None:
            way, label = tuple(s for s in way if "stays: " in s), "state"
        pairs += [(label * (i == 0), s) for i, s in enumerate(way)]
    if proof.fits and moves:
        pairs.append(("step time", _step_time(proof)))
        pairs.append(("bound", _bound(search)))
        if search.binding:
            pairs.append(("limited by", _binding(record)))
        elif _left_by_choice(record):
            pairs.append(("left free", _left_free(record)))
        pairs += _more_memory(record)
        if search.smallest_budget:
            pairs.append(("least", smallest_text(search)))
    pairs += [("pin", _pin(pin, record)) for pin in search.pins]
    if search.unpriced:
        pairs.append(("not priced", _listed(search.unpriced, 6)))
    pairs += [("note", note) for note in proof.notes if _concerns(note, proof)]
    if donated := record.program.donate_argnums:
        numbers = ", ".join(str(number) for number in donated)
        pairs.append(("donated", f"argument{'s' * (len(donated) > 1)} {numbers}"))
    if search.trials:
        pairs.append(("compiled", _trials(search)))
    return pairs


def _pin(pin: PinPrice, record: PlanRecord) -> str:
    """What a pin costs, or that the compiler refused what it asks for."""
    text = f"{pin.pattern!r} to {pin.decision} ({count_of(pin.matched, 'value')})"
    mine = [d for d in record.decisions if d.pinned == pin.pattern]
    refused = any("may not be offloaded: the compiler" in n for n in record.proof.notes)
    if refused and pin.decision == "offload" and len(mine) < pin.matched:
        if mine:
            return f"{text}: kept for {len(mine)}; of others see the notes"
        several = "held by another pin, or " * (len(record.pins) > 1)
        return f"{text}: {several}not possible, see the notes"
    if pin.seconds > 0:
        return f"{text}: costs {format_seconds(pin.seconds)} per step"
    return f"{text}: costs nothing"


def _step_time(proof: ProofRecord) -> str:
    seconds = format_seconds(proof.step_seconds)
    exposed = format_seconds(proof.exposed_seconds)
    waiting = f", {exposed} of it waiting for host copies"
    return (
        f"{seconds} simulated from the compiled schedule"
        f"{waiting if proof.exposed_seconds > 0 else ', no copy exposed'}"
    )


def _bound(search: SearchRecord) -> str:
    bound = format_seconds(search.bound_seconds)
    model = format_seconds(search.model_seconds)
    found = f"this one: {model}; gap {search.gap:.2%}"
    return f"no plan is predicted below {bound} ({found})"


def _binding(record: PlanRecord) -> str:
    titles, said = stack_titles(record), list[str]()
    for text in record.search.binding:
        for name, title in titles.items():
            text = text.replace(name, title)
        said.append(text)
    return ", ".join(dict.fromkeys(said))


def _left_by_choice(record: PlanRecord) -> bool:
    """Whether the plan could store more, and is proven to be better off without."""
    return (
        record.outcome == "optimal"
        and record.device_bytes < 0.9 * record.budget_bytes
        and any(d.decision != "keep" for d in record.decisions)
    )


def _left_free(record: PlanRecord) -> str:
    free = format_bytes(record.budget_bytes - record.device_bytes)
    return f"{free}: storing more would take longer than computing it again"


def _more_memory(record: PlanRecord) -> Iterable[tuple[str, str]]:
    """What one more unit buys: one that is small beside the budget, as prices are.

    Nothing is said where it is more than a policy without any limit saves: then the
    price is that of less than a unit.
    """
    budget, search = record.budget_bytes, record.search
    unit = next((u for u in _UNITS if budget >= 4 * _UNITS[u]), "64 KiB")
    saved = search.seconds_per_gib * _UNITS[unit] / 2**30
    fastest = min((b.seconds for b in search.baselines), default=0.0)
    most = search.model_seconds - fastest
    if 0 < saved <= most and saved >= _WORTH_SAYING * search.model_seconds:
        yield f"{unit} more", f"would save about {format_seconds(saved)} of each step"


def _concerns(note: str, proof: ProofRecord) -> bool:
    """A limit on pinned host memory is nothing to a plan that puts nothing there."""
    return proof.host_bytes > 0 or VARIABLE not in note


def smallest_text(search: SearchRecord) -> str:
    """The smallest budget, and whether it works or is what a prediction says."""
    size = known_size(search.smallest_budget, search.smallest_budget_is)
    wishes = [
        word
        for word, given in (("pins", search.pins), ("forbids", search.forbid))
        if given
    ]
    which = f" with these {' and '.join(wishes)}" if wishes else ""
    works = " known to work" * (not wishes and search.smallest_budget_is == "compiled")
    return f"{size}: the smallest budget{which or works}"


def _trials(search: SearchRecord) -> str:
    trials = search.trials
    seconds = sum(trial.seconds_to_compile for trial in trials)
    sizes = " → ".join(format_bytes(t.compiled_bytes) for t in trials)
    return (
        f"{count_of(len(trials), 'program')} in {format_seconds(seconds)}: "
        f"{sizes} (first guess {format_bytes(trials[0].predicted_bytes)}); "
        f"planned in {format_seconds(search.planning_seconds)}"
    )


def _listed(items: Sequence[str], most: int) -> str:
    more = len(items) - most
    text = ", ".join(items[:most])
    return f"{text} and {more} more" if more > 0 else text
