"""Which versions a plan or a calibration was made with."""

import importlib.metadata
import platform

_PACKAGES = ("stowax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin")


def versions() -> dict[str, str]:
    """Versions of JAX, of Python, and of what compiles: what is installed of it.

    No package is loaded for that.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
