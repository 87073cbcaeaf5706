"""What a machine was measured to reach, as text: rates, copies, what is missing.

`stowax calibrate` prints it.
"""

from .._hardware._figures import GB, TERA
from .._records._calibration import CalibrationRecord
from .._units import format_bytes
from ._layout import Align, count_of, facts, lines_of, table, text_width

_BY = {
    "compute_on": "by the host's processor, asked from the device",
    "CPU backend": "by the host's processor",
    "these devices": "by these devices",
}


def calibration_text(found: CalibrationRecord, width: int | None = None) -> str:
    """One screen about a calibration.

    **Arguments:** `width` in columns, by default the terminal's.
    """
    columns = text_width(width)
    count = count_of(found.device_count, "device")
    busy = ", all busy" if found.device_count > 1 else ""
    lines = lines_of(
        f"{found.device_kind} on {found.host}: {count}{busy}, rates of one", columns
    )
    rates = [
        (f"matrix {name}", f"{rate / TERA:.3g}", "TFLOP/s")
        for name, rate in found.matrix.items()
    ]
    if found.vector is not None:
        rates.append(("vector float32", f"{found.vector / TERA:.3g}", "TFLOP/s"))
    if found.memory_bandwidth is not None:
        rates.append(("memory", f"{found.memory_bandwidth / GB:.3g}", "GB/s"))
    if found.host_update is not None and found.host_update_by is not None:
        by = _BY[found.host_update_by]
        rates.append(("updates", f"{found.host_update / GB:.3g}", f"GB/s {by}"))
    if rates:
        lines += ["", *_table(("", "", ""), rates, columns)]
    if found.copies:
        drawn = [
            (format_bytes(row.bytes), *(f"{rate / GB:.3g}" for rate in each))
            for row in found.copies
            for each in [(row.out, row.into, row.both)]
        ]
        headers = ("copies of", "out\nGB/s", "in\nGB/s", "both ways\nGB/s each")
        lines += ["", *_table(headers, drawn, columns)]
    if found.one_memory:
        lines += [
            "",
            *lines_of(
                "Device and host memory are the same here: a copy between them "
                "crosses no link.",
                columns,
            ),
        ]
    if found.unmeasured:
        lines += ["", "Not measured"]
        lines += facts([(item.what, item.why) for item in found.unmeasured], columns)
    versions = ", ".join(
        f"{name} {version}"
        for name, version in found.versions.items()
        if name != "backend"
    )
    ending = f"{found.date[:10]}, in {found.seconds:.0f} s; {versions}"
    return "\n".join([*lines, "", *lines_of(ending, columns)])


def _table(
    headers: tuple[str, ...], rows: list[tuple[str, ...]], columns: int
) -> list[str]:
    sides: tuple[Align, ...] = () if any(headers) else ("left", "right", "left")
    return lines_of(table(headers, rows, sides), columns)
