"""Damaged files: refused with a reason, no more than a miss, or right all the same."""

import collections
import faulthandler
import pathlib
import random
import signal
import tempfile
import traceback
import warnings
from typing import Any

from benchmarks._record import Figures
from benchmarks.reliability_damage import damaged
from benchmarks.reliability_readers import KINDS, Kind, WrongNumbersError
from stowax import StowaxError

HANGS_AFTER_SECONDS = 60


class _HungError(BaseException):
    """A file was read for too long."""


def _hung(*_: Any) -> None:
    raise _HungError


def _one(kind: Kind, path: pathlib.Path, seed: int) -> tuple[str, str]:
    """What became of one damaged file, and what was said."""
    draw = random.Random(seed)
    path.write_bytes(damaged(kind.whole, draw))
    signal.alarm(HANGS_AFTER_SECONDS)
    try:
        return kind.read(path, draw), ""
    except StowaxError as error:
        if str(error).strip():
            return "refused", str(error)
        return "raw", f"{type(error).__name__} without a text"
    except WrongNumbersError as error:
        return "lost", str(error)
    except _HungError:
        return "hung", f"more than {HANGS_AFTER_SECONDS} s"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{pathlib.Path(where.filename).name}:{where.lineno}"
        return "raw", f"{type(error).__name__} at {at}: {error}"[:300]
    finally:
        signal.alarm(0)


def mutations(name: str, count: int, seed: int, say: Any) -> Figures:
    """The figures of `count` damaged files of a kind, each from a seed of its own."""
    kind = KINDS[name]()
    found: collections.Counter[str] = collections.Counter()
    said: dict[str, str] = {}
    faulthandler.enable()  # a crash in C says where
    before = signal.signal(signal.SIGALRM, _hung)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = pathlib.Path(folder, kind.name)
            for number in range(seed, seed + count):
                outcome, text = _one(kind, path, number)
                found[outcome] += 1
                if outcome in ("raw", "lost", "hung"):
                    said.setdefault(text, f"seed {number}: {outcome}: {text}")
                    say(f"seed {number}: {outcome}: {text}")
    finally:
        signal.signal(signal.SIGALRM, before)
    fine = ("refused", "missed", "used", "run")
    return {
        "tries": count,
        "right": sum(found[name] for name in fine),
        **{name: found[name] for name in (*fine, "lost", "raw", "hung")},
        "seed": seed,
        "said": [*said.values()][:10],
    }
