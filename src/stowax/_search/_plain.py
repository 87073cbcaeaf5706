"""The step as it is, perhaps with its state donated: whether it fits.

Its programs are the same for every budget and wish, so that searches share them.
"""

from collections.abc import Mapping

import jax

from .._state._shards import device_bytes
from .._survey._survey import predict
from ._attempt import Attempt
from ._loop import SLACK, Search
from ._trial import compile_and_read, outcome

_DOUBT, _DOUBT_UNROLLED = 1.08, 1.35
"""How far predictions of layers as they are written may be above the truth.

Measured on the models of the benchmarks and of the tutorial: scans by 8 %, unrolled
loops by up to 31 %. A compile that is not needed costs less than a plan that is not.
"""


def try_plain(search: Search) -> Attempt | None:
    """Compiles the step where it may fit: as it is, then with its state donated."""
    ways = (True,) if search.donate else (False, True)
    for donate in ways:
        if donate and not search.may_donate and True in ways[1:]:
            continue
        if donate in search.written:
            may_fit = search.fits(search.written[donate])
        else:
            needed = plain_bytes(search, donate=donate)
            if donate and is_straight(search):
                other = plain_bytes(search, donate=False)
                needed = min(needed, other - _returned(search))
            may_fit = needed <= search.budget * doubt(search)
        if may_fit:
            attempt = compile_plain(search, donate=donate)
            if search.fits(attempt):
                return attempt
    return None


def plain_bytes(search: Search, *, donate: bool) -> int:
    """Device bytes that the step as it is should need."""
    if donate not in search.plain:
        _, prediction = predict(search.survey, None, donate=donate)
        search.plain[donate] = prediction.device_total
    return search.plain[donate] + seen_beyond(search)


def is_straight(search: Search) -> bool:
    """Whether layers are a Python loop's: XLA orders what is in one as it likes.

    It updates a parameter as soon as its gradient is there, where the step as it is
    traced has all gradients first. A prediction knows nothing of that.
    """
    return any(t.stack.separate for t in search.survey.step.stacks.values())


def _returned(search: Search) -> int:
    """Bytes of the arguments that results may overwrite."""
    leaves, step = jax.tree.leaves(search.survey.specs), search.survey.step
    return sum(
        device_bytes(leaves[i])
        for i in step.updates
        if step.arguments[i].position in step.donate
    )


def seen_beyond(search: Search) -> int:
    """What the step as it is was seen to need beyond its prediction."""
    seen = [a for a in search.attempts if a.decisions is None]
    return sum(a.measured.excess for a in seen or search.written.values())


def doubt(search: Search) -> float:
    """The factor between a prediction that is too large and the budget."""
    if search.attempts:
        return 1 + SLACK
    return _DOUBT_UNROLLED if is_straight(search) else _DOUBT


def bytes_as_written(search: Search) -> int:
    """Device bytes of the step as it is, its state donated where that may be."""
    return compile_plain(search, donate=search.may_donate).measured.compiled_bytes


def compile_plain(
    search: Search,
    *,
    donate: bool,
    options: Mapping[str, str | bool] | None = None,
) -> Attempt:
    """The step as it is, compiled, or as it was for another search.

    **Arguments:** `options` tell the compiler of a smaller chip.
    """
    if not options and (known := search.written.get(donate)) is not None:
        search.add(known)
        return known
    told = " for a smaller chip" if options else ""
    search.say(f"compiling the step as it is{told}{', its state donated' * donate}")
    measured = compile_and_read(
        search.survey,
        f"as written{told}",
        None,
        {**(options or {}), **search.user_options},
        cache=search.cache,
        correction=seen_beyond(search),
        donate=donate,
    )
    search.say(outcome(measured, search.budget, search.host_budget))
    attempt = Attempt(
        decisions=None,
        solution=None,
        evaluation=None,
        options={**(options or {}), **search.user_options},
        donated=donate,
        measured=measured,
    )
    search.add(attempt)
    if not options:
        search.written[donate] = attempt
    return attempt
