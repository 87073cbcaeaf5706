"""The transfers and stalls of a running training loop: `stowax.audit`.

While an audit is on, `_watch` notes what the program does with JAX; when it ends,
`_find` cuts that into steps and says what is wrong. What is in a compiled program
is `stowax.inspect`'s; here it is what the loop around it does.

What goes silently wrong: the first steps of a loop compile, and happen once; so what is
reported happens in most of the steps that were seen, except compilation itself.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import ArgumentError
from .._jax_hooks import unwatched, watch
from .._records._audit import AuditRecord, Finding
from ._allow import checked, without_allowed
from ._arrays import is_reuse
from ._find import findings_of
from ._watch import Recorder

_LEAST_BYTES = 1 << 20
_STEPS = 200


class Audit:
    """What `stowax.audit` found: `findings`, and as a context, what finds them.

    `str(audit)` is a report for a terminal, `audit.to_json()` has JSON types.
    """

    def __init__(self, recorder: Recorder, allow: tuple[str, ...]):
        self._recorder, self._allow = recorder, allow
        self._watching = contextlib.ExitStack()
        self._record: AuditRecord | None = None

    @property
    def record(self) -> AuditRecord:
        """The whole result, as a record.

        **Raises:** `ArgumentError` while the context is open.
        """
        if self._record is not None:
            return self._record
        raise ArgumentError(
            "audit", "an audit that is not over", "Read it after the `with` block."
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, the costliest first."""
        return self.record.findings

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types: `{"findings": [...], ...}`."""
        return self.record.to_json()

    def __str__(self) -> str:
        from ..report import audit_text

        return audit_text(self.record)

    def __enter__(self) -> "Audit":
        if self._record is not None:
            raise ArgumentError(
                "audit", "an audit that is over", "Make another one: stowax.audit()."
            )
        self._watching.enter_context(watch(self._recorder))
        self._recorder.begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the audit, once; `error` is what ended the loop."""
        self._watching.close()
        if self._record is None or (error is not None and is_reuse(error)):
            found = findings_of(self._recorder.end(error))
            self._record = without_allowed(found, self._allow)

    def when_full(self, tell: Callable[[], None]) -> None:
        """Calls `tell` when as many steps as were asked for have been seen."""

        def full() -> None:
            self.close()
            tell()

        self._recorder.on_full = full


def audit(
    function: Callable[..., Any] | None = None,
    *args: Any,
    steps: int | None = None,
    allow: str | Sequence[str] = (),
    least_bytes: int = _LEAST_BYTES,
) -> Audit:
    """Finds the transfers and stalls of a training loop that no compiled program shows.

    Around some steps of a loop it is a context; with a function it runs that `steps`
    times. What the function returns in the place of its first arguments, as a training
    step returns its state, is handed to the next step; `args` themselves stay valid.

    **Arguments:** `function` is one step of the loop, jitted or not, and `args` are its
    arguments. `steps` is how many steps are run (default: 5); as a context, after how
    many nothing more is noted (default: 200). `allow` has kinds of findings that are
    meant so, as `"host-read"` or `"host-read:train.py"`; a comment at the end of the
    line, `# stowax: allow host-read`, says the same. Buffers below `least_bytes` are
    not worth donating.

    **Returns:** an `Audit`, whose `findings` have `kind`, `file`, `line`, `count`,
    `bytes` and `seconds` a step, and `remedy`.

    **Raises:** `ArgumentError` for arguments that make no sense; whatever the function
    raises.

    >>> step = jax.jit(lambda w, x: w + x)
    >>> found = stowax.audit(lambda w: step(w, 0.5), jnp.ones(3))
    >>> [(finding.kind, finding.count) for finding in found.findings]
    [('repeated-constant', 1)]
    """
    if steps is not None and (not isinstance(steps, int) or steps < 2):
        raise ArgumentError(
            "steps",
            f"{steps!r}",
            "Write 2 or more: what happens in every step takes two steps to see.",
        )
    rules = checked(allow)
    if function is None:
        return Audit(Recorder(steps or _STEPS, least_bytes), rules)
    if not callable(function):
        raise ArgumentError(
            "function",
            type(function).__name__,
            "Write stowax.audit(train_step, *args), or `with stowax.audit():`.",
        )
    count = steps or 5
    found = Audit(Recorder(1 << 30, least_bytes), rules)
    with unwatched():
        handed = [_copied(arg) for arg in args]
    with found:
        for _ in range(count):
            _step(found._recorder, function, args, handed)
    return found


def _step(
    recorder: Recorder, function: Any, args: tuple[Any, ...], handed: list[Any]
) -> None:
    """One step; `handed` has its arguments, and gets the next one's."""
    recorder.mark_step()
    results = function(*handed)
    with unwatched():
        whole = not isinstance(results, tuple | list) or (
            bool(handed) and _kind(results) == _kind(handed[0])
        )
        back = (results,) if whole else results
        for position, arg in enumerate(handed):
            # A step returns what it updates, in the order of its arguments.
            if position < len(back) and _kind(back[position]) == _kind(arg):
                handed[position] = back[position]
            elif any(map(_is_gone, jax.tree.leaves(arg))):
                handed[position] = _copied(args[position])


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _copied(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree
    )


def _kind(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    shapes = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else type(leaf)
        for leaf in leaves
    ]
    return structure, shapes if leaves else None
