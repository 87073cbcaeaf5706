"""Plans that were made before, in a folder, by what they are for.

A training job that is started again asks for the same plan (`_plan._key`): it is read,
nothing is solved and nothing compiled to find it. Its program comes from JAX's own
persistent cache, where the user has one.

A file that cannot be read, or was changed, is no plan, and is written anew. A folder
that cannot be written to is no error: plans are made, then, as if none were kept.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .._errors import ArgumentError, StowaxError
from .._files import read_own, user_cache, write_own
from .._plan._plan import Plan, load_plan


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The plans in a folder; `None`: none are kept."""

    folder: pathlib.Path | None

    @classmethod
    def within(cls, cache: str | os.PathLike[str] | bool | None) -> "Kept":
        """Those in the folder `cache`; `None`: in the user's own; `False`: none."""
        if cache is False:
            return cls(None)
        if cache is None:
            return cls(user_cache() / "plans")
        if not isinstance(cache, str | os.PathLike):
            raise ArgumentError(
                "cache", f"{cache!r}", "Write the path of a folder, or False for none."
            )
        return cls(pathlib.Path(cache) / "plans")

    def read(self, key: str, options: Mapping[str, Any]) -> Plan | None:
        """The plan of that key, if one is kept; `options` are the user's own."""
        for path in self._paths(key):
            # Read whole first: what is not as it was written is no plan.
            with contextlib.suppress(OSError, StowaxError):
                if path.name == _name(key, read_own(path)):
                    return load_plan(path, compiler_options=options)
        return None

    def write(self, key: str, plan: Plan) -> None:
        """Keeps a plan; where nothing can be written, does nothing."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = plan.to_text().encode()
            name = _name(key, data)
            write_own(self.folder / name, data)
            for other in self._paths(key):
                if other.name != name:
                    other.unlink()
        except OSError:
            return

    def _paths(self, key: str) -> list[pathlib.Path]:
        """One, or what two processes have just written of the same key."""
        folder = self.folder
        return [] if folder is None else sorted(folder.glob(f"{key}-*.json"))


def _name(key: str, data: bytes) -> str:
    """The name of a kept plan's file, by which it is told whether it was changed."""
    return f"{key}-{hashlib.sha256(data).hexdigest()[:32]}.json"
