"""Why a plan does with a value what it does, in a sentence.

`_describe` asks for one per decision. The sentence is written here as people read it,
in tables, on the page and in files: nothing takes it apart again.
"""

from collections.abc import Sequence

from .._records._stages import Body, Decision, HostUpdate, Link, Value
from .._survey._survey import Survey
from .._units import format_bytes, format_ratio, format_seconds

_FREE_SECONDS = 1e-7
"""What takes less is called next to nothing: a kernel's start takes longer."""

_VIEWS = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "expand_dims",
        "reshape",
        "squeeze",
        "transpose",
    )
)


def reason_of(
    survey: Survey,
    body: Body,
    value: Value,
    decision: Decision,
    parts: Sequence[HostUpdate],
) -> str:
    """Why `value` of `body` is kept, offloaded or computed again.

    `parts` are those of the update that the host's processor does.
    """
    if body.phase == "update":
        return _state_reason(survey, value, decision, parts)
    return layer_reason(body, value, decision, survey.target.link)


def layer_reason(body: Body, value: Value, decision: Decision, link: Link) -> str:
    """Why a value of a layer is where it is; seconds and bytes are of one layer.

    What is there once, as a segment of straight-line code is, is no layer.
    """
    again, each = _again(body, value), " a layer" if body.count > 1 else ""
    if decision == "offload":
        forward = max(body.forward_seconds, 1e-12)
        filled = value.bytes / link.device_to_host / forward
        window = (
            f"fills {100 * filled:.0f} % of"
            if filled <= 1
            else f"takes {format_ratio(filled)} ×"
        )
        return (
            f"its copy {window} the forward window; computing it again would take "
            f"{again or 'next to nothing'}"
        )
    if decision == "keep":
        if value.operation is None:
            what = "what a layer reads" if each else "what is made elsewhere"
            return f"{what} cannot be computed again"
        if again:
            return f"computing it again would take {again}{each}"
        primitive = body.operations[value.operation].primitive
        if primitive in _VIEWS:
            # What is spared is the value that it comes from.
            what = "conversion" if primitive == "convert_element_type" else "view"
            return (
                f"a {what}: without it, the value behind it is kept or computed again"
            )
        return "computing it again would take next to nothing"
    freed = f"frees {format_bytes(value.bytes)}{each}"
    return f"costs {again or 'next to nothing'}, {freed}"


def _again(body: Body, value: Value) -> str:
    """What computing a value again takes, as text; empty if next to nothing."""
    if value.operation is None:
        return "no time: it is given"
    seconds = body.operations[value.operation].seconds
    return "" if seconds < _FREE_SECONDS else format_seconds(seconds)


def _state_reason(
    survey: Survey, value: Value, decision: Decision, parts: Sequence[HostUpdate]
) -> str:
    """Why an array of the step's state is where it is."""
    why = survey.state.reasons[value.index] if survey.state else ""
    if value.allowed == {"keep"} and value.stays:
        return f"it stays: {value.stays}"
    link = survey.target.link
    out, back = value.bytes / link.device_to_host, value.bytes / link.host_to_device
    seconds = format_seconds(max(out, back))
    if decision == "keep":
        return f"its copies would take {seconds}"
    read_only = survey.state.read_only if survey.state else ()
    if value.index in read_only or not (value.update_in or value.update_out):
        return _read_only_reason(survey, value)
    for part in parts:
        if value.index in part.values:
            return (
                f"the host's processor updates it, in {format_seconds(part.seconds)} "
                "with what belongs to it; through the device that would take "
                f"{format_seconds(part.stream_seconds)}"
            )
    if why:
        return f"copies take {seconds}; as a whole on the device at its turn: {why}"
    return f"streams through the update in blocks; its copies take {seconds} each way"


def _read_only_reason(survey: Survey, value: Value) -> str:
    counts = {body.name: body.count for body in survey.bodies}
    gone = sum(p.backward_out * counts.get(p.body, 0) for p in value.passages)
    seconds = (value.bytes - gone) / survey.target.link.host_to_device
    reason = (
        "layers fetch it, nothing changes it; its copies take "
        f"{format_seconds(seconds)} a pass"
    )
    if gone:
        reason += "; its gradient, which the step returns, comes in host memory"
    return reason
