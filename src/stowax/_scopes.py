"""The part of a model, from the names that JAX gives equations and instructions."""

import re

_TRANSFORMED = re.compile(r"\b(?:jvp|transpose|vmap|linearize|remat|rematted)\(")
_JAX_OWN = re.compile(
    r"|jit\(.*|p?jit|scan|while|cond|body|body_fun|cond_fun|branch_\d+_fun|checkpoint"
    r"|remat\d?|rematted_computation|closed_call|core_call|custom_[jv]{1,2}p_call.*"
    r"|shard_map|stowax\..*|.*->.*|.*<.*"
)


def scopes_of(name: str) -> tuple[str, ...]:
    """What `jax.named_scope` put into a name, without what JAX puts among it.

    Transformations wrap a scope, einsum adds its letters, loops and jitted functions
    their names. The last part of an instruction's name is its operation.

    >>> scopes_of("jit(step)/transpose(jvp(GPT))/Block_0/attention/bqk,bkd->bqd/mul")
    ('GPT', 'Block_0', 'attention', 'mul')
    """
    parts = (
        part if part.startswith("jit(") else part.rstrip(")")
        for part in _TRANSFORMED.sub("", name).split("/")
    )
    return tuple(part for part in parts if not _JAX_OWN.fullmatch(part))
