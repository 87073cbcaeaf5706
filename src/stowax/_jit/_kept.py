"""Plans that were made before, in a folder, by what they are for.

A training job that is started again asks for the same plan (`_plan._key`): it is read,
nothing is solved and nothing compiled to find it. Its program comes from JAX's own
persistent cache, where the user has one.

A file that cannot be read is no plan, and is written anew. A folder that cannot be
written to is no error: plans are made, then, as if none were kept.
"""

import dataclasses
import os
import pathlib

from .._errors import ArgumentError, StowaxError
from .._files import user_cache
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

    def read(self, key: str) -> Plan | None:
        """The plan of that key, if one is kept."""
        if self.folder is None:
            return None
        try:
            return load_plan(self._path(key))
        except StowaxError:
            return None

    def write(self, key: str, plan: Plan) -> None:
        """Keeps a plan; where nothing can be written, does nothing."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plan.save(self._path(key))
        except (OSError, ArgumentError):
            return

    def _path(self, key: str) -> pathlib.Path:
        assert self.folder is not None, "there is no folder to keep plans in"
        return self.folder / f"{key}.json"
