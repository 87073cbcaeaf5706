"""The plain step in the place of a planned one: whatever is found is a false alarm.

It is compiled otherwise than the step beside it: its loss computes again what the
backward pass reads, so XLA fuses other operations, and sums run in another order.
"""

import types

import jax

from .judge import Front


class NoPlan:
    """What is asked of a plan, of one that moves nothing."""

    program = types.SimpleNamespace(rewritten=False, stacks=(), arguments=())
    proof = types.SimpleNamespace(notes=())

    def place(self, *args):
        return args[0] if len(args) == 1 else args


_CALLS = {"debug print", "debug callback", "io callback"}


def otherwise(program):
    """The plain step compiled otherwise; `jax.checkpoint` takes no calls of hosts."""
    calls = _CALLS & {*program.layer, *program.other}
    return Front(
        mark=jax.jit if calls else jax.checkpoint,
        plan=lambda step, *args, **options: NoPlan(),
        apply=lambda plan, step: jax.jit(step),
        confirm=False,
    )
