"""Every error stowax raises on purpose.

One shape for all of them: which argument, what it got, and what to write instead. The
command line prints the message alone (exit code 2); a program sees a subclass of
`StowaxError` that is also the built-in exception it would expect.
"""

import collections.abc
import difflib
import typing


class StowaxError(Exception):
    """Base of every error that stowax raises on purpose."""


class ArgumentError(StowaxError, ValueError):
    """An argument that cannot be used.

    **Arguments:** `argument` names it as the user wrote it, `got` describes what came,
    `instead` says what to write. The message reads
    ``{argument}: got {got}. {instead}``.
    """

    def __init__(self, argument: str, got: str, instead: str):
        self.argument, self.got, self.instead = argument, got, instead
        super().__init__(f"{argument}: got {got}. {instead}")


class CallError(ArgumentError, TypeError):
    """An argument that the step does not take: a `TypeError` to Python."""

    def near(self, options: collections.abc.Iterable[str]) -> "CallError":
        """The same error, which asks for the nearest of some options if one is near."""
        instead = did_you_mean(self.argument, options) + self.instead
        return CallError(self.argument, self.got, instead)


def did_you_mean(name: str, options: collections.abc.Iterable[str]) -> str:
    """A question in front of an error's last words; empty where no option is near.

    >>> did_you_mean("budgt", ["budget", "target"])
    'Did you mean budget=? '
    """
    near = difflib.get_close_matches(name, options, n=1)
    return f"Did you mean {near[0]}=? " if near else ""


class StepError(StowaxError, ValueError):
    """The training step cannot be planned as it is written."""


class NothingToPlanError(StepError):
    """The step differentiates nothing, or takes what no plan can be made of."""


class MisfitError(StowaxError, MemoryError):
    """No plan keeps the step within the budget; the message has the smallest one.

    `plan` is what needs the least of all that was tried, to look at.
    """

    def __init__(self, message: str, plan: typing.Any = None):
        self.plan = plan
        super().__init__(message)


class PlanMismatchError(StowaxError, ValueError):
    """A plan that was made for another step, target or version of stowax."""


class MissingExtraError(StowaxError, ImportError):
    """A target needs a package that is not installed; the message has the command."""


class CompileError(StowaxError, RuntimeError):
    """The target's compiler refused the program; the message has its own words."""


class OutOfMemoryCompileError(CompileError):
    """The program needs more device memory than the target's compiler allows.

    `needed_bytes` and `available_bytes` are the compiler's own figures per device, to
    the two digits it prints; `None` where it gave none.
    """

    def __init__(
        self, message: str, needed_bytes: int | None, available_bytes: int | None
    ):
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        super().__init__(message)


class InternalError(StowaxError, RuntimeError):
    """A mistake of stowax's own, found before it could change a number."""


class TraceError(StowaxError, RuntimeError):
    """A profiler's trace that does not hold what was to be read from it."""


class TransferError(StowaxError, RuntimeError):
    """An implicit transfer under `stowax.strict`; `file` and `line` are the user's."""

    def __init__(self, file: str, line: int, what: str, instead: str):
        self.file, self.line = file, line
        super().__init__(f"{file}:{line}: {what}. {instead}")


class OffloadVanishedError(StowaxError, RuntimeError):
    """The compiled program does not hold the copies that the plan decided on.

    **Arguments:** `scopes` are the names that these copies have in the program.
    """

    def __init__(self, message: str, scopes: tuple[str, ...] = ()):
        super().__init__(message)
        self.scopes = scopes


_LESS_MEMORY = {
    "plain": 'Write reference="cpu" to run it on the host\'s processor, or verify a '
    "plan for a smaller batch.",
    "planned": "The arguments themselves lie beside it: give them as numpy arrays "
    "(jax.device_get), or in host memory.",
}


class VerifyMemoryError(StowaxError, MemoryError):
    """A device has no room for one of the runs of `stowax.verify`.

    `version` is the run's: `"plain"` or `"planned"`.
    """

    def __init__(self, version: str, message: str):
        self.version = version
        first = message.strip().partition("\n")[0]
        super().__init__(
            f"verify: the {version} step does not fit on the device. "
            f"{_LESS_MEMORY[version]} JAX says: {first}"
        )
