"""What a user hands over as the step: the function, or what they have made of it.

A wrapper returns more than the function in it does: one that is taken for the other
gives itself away.
"""

import functools

import jax


def _wrapper(step):
    @functools.wraps(step)
    def wrapped(*args, **named):
        *made, metrics = step(*args, **named)
        return *made, {**metrics, "twice": 2 * metrics["loss"]}

    return wrapped


def _partial(step):
    return functools.partial(lambda told, *args, **named: step(*args, **named), "told")


class _Trainer:
    def __init__(self, step):
        self._step = step

    def train_step(self, *args, **named):
        return self._step(*args, **named)

    def __call__(self, *args, **named):
        return self._step(*args, **named)


_MADE = {
    "function": lambda step: step,
    "jitted": jax.jit,
    "wrapper": _wrapper,
    "wrapper of jitted": lambda step: _wrapper(jax.jit(step)),
    "partial": _partial,
    "method": lambda step: _Trainer(step).train_step,
    "object": _Trainer,
}


def handed(how, step):
    """What is handed over, by a word of `programs.HANDED`."""
    return _MADE[how](step)
