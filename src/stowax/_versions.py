"""Which versions a plan or a calibration was made with."""

import importlib.metadata
import platform

import jax

_PACKAGES = ("stowax", "jaxlib", "libtpu", "jax-cuda12-plugin")


def versions() -> dict[str, str]:
    """Versions of JAX, of Python, and of what compiles: what is installed of it."""
    found = {"jax": jax.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
