"""What the times of a step are called, wherever they are shown."""

from .._records._timeline import Timeline

_PARTS = {
    "computing": "compute_seconds",
    "waiting for the host": "exposed_seconds",
    "waiting for other devices": "collective_wait_seconds",
    "idle": "idle_seconds",
}
_BUSY = {
    "device to host": "device_to_host_seconds",
    "host to device": "host_to_device_seconds",
    "collectives": "collective_seconds",
}


def parts_of(timeline: Timeline) -> list[tuple[str, float]]:
    """What a step's time goes into, with the seconds."""
    return [(title, getattr(timeline, field)) for title, field in _PARTS.items()]


def busy_in(timeline: Timeline) -> list[tuple[str, float]]:
    """How long each link is busy meanwhile."""
    return [(title, getattr(timeline, field)) for title, field in _BUSY.items()]
