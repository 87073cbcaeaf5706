"""What a step asked for: read from its trace, its lowering, or what is compiled.

`_inspect` is the caller. The more there is, the more is known: a jitted function with
arguments says everything; a `jax.stages.Compiled` still knows its arguments; an
executable alone knows nothing, and the hazards that need to know are left out.
"""

import importlib.metadata
import inspect
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .. import _jax, _jax_targets
from .._hardware._figures import Chip
from .._records._intent import ArgumentAsked, Intent, OutputAsked
from .._step._lineage import fetched_in_vain, returned_state
from .._target._compiled import LoweredProgram
from .._target._specs import HOST_KINDS
from ._intent_copies import find_copies, policies_of
from ._intent_stacks import find_stacks, passed_on


def intent_of_lowered(
    lowered: LoweredProgram, given: Mapping[str, Any], chip: Chip | None
) -> Intent:
    """Everything: `lowered` comes from `Target.lower(jitted, *args)`.

    **Arguments:** `given` are the options that it was compiled with, besides those that
    `jax.jit` was told; `chip` prices operations.
    """
    traced = lowered.traced
    kept, places, returns, options = _jax_targets.lowering_details(lowered.lowered)
    devices = len(_jax_targets.lowered_devices(lowered.lowered))
    jaxpr = traced.jaxpr
    found = find_copies(jaxpr, chip if _priceable(chip) else None, devices)
    returned, fetched = returned_state(jaxpr), fetched_in_vain(jaxpr)
    opened, unchanged = _jax.open_jaxpr(jaxpr), passed_on(jaxpr)
    infos = jax.tree.leaves_with_path(lowered.lowered.args_info)
    arguments = tuple(
        ArgumentAsked(
            path=_argument_path(path),
            bytes=_shard_bytes(variable.aval, sharding),
            parameter=kept.index(i) if i in kept else None,
            on_host=_on_host(sharding) or _jax.is_host_type(variable.aval),
            donated=bool(info.donated),
            returned=returned.get(i),
            fetched_in_vain=i in fetched,
            unchanged=unchanged.index(i) if i in unchanged else None,
        )
        for i, ((path, info), variable, sharding) in enumerate(
            zip(infos, opened.invars, places, strict=True)
        )
    )
    outputs = tuple(
        OutputAsked(
            path=f"its result{jax.tree_util.keystr(path)}",
            on_host=_on_host(sharding) or _jax.is_host_type(variable.aval),
        )
        for (path, _), variable, sharding in zip(
            jax.tree.leaves_with_path(lowered.lowered.out_info),
            opened.outvars,
            returns,
            strict=True,
        )
    )
    return Intent(
        copies=tuple(found.copies),
        stacks=find_stacks(jaxpr),
        policies=policies_of(found),
        named=frozenset(found.named),
        opaque=tuple(sorted(found.opaque)),
        arguments=arguments,
        outputs=outputs,
        options=options_of(os.environ, options, given),
        all_options=True,
        jaxlib=jaxlib_version(),
        devices=devices,
        source=_source_of_function(lowered.jitted),
        planned=hasattr(lowered.jitted, "stowax_plan"),
    )


def intent_of_compiled(compiled: Any) -> Intent:
    """What is known of something compiled: its arguments, if JAX compiled it."""
    if not isinstance(compiled, jax.stages.Compiled):
        return Intent(jaxlib=jaxlib_version())
    infos = jax.tree.leaves_with_path(compiled.args_info)
    shardings = jax.tree.leaves(
        compiled.input_shardings, is_leaf=lambda leaf: leaf is None
    )
    if len(infos) != len(shardings):
        return Intent(jaxlib=jaxlib_version())
    arguments, number = [], 0
    for (path, info), sharding in zip(infos, shardings, strict=True):
        arguments.append(
            ArgumentAsked(
                path=_argument_path(path),
                bytes=_shard_bytes(info, sharding),
                parameter=number if sharding is not None else None,
                on_host=_on_host(sharding),
                donated=bool(info.donated),
            )
        )
        number += sharding is not None
    devices = {d for s in shardings if s is not None for d in s.device_set}
    if not all(device.addressable_memories() for device in devices):
        return Intent(jaxlib=jaxlib_version(), without_memories=True)
    return Intent(
        arguments=tuple(arguments),
        jaxlib=jaxlib_version(),
        devices=max(1, len(devices)),
    )


def jaxlib_version() -> str:
    """The version of jaxlib that compiles here; empty where it is not installed."""
    try:
        return importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return ""


def flags_of(environment: Mapping[str, str]) -> dict[str, str]:
    """XLA's options that the environment sets: `XLA_FLAGS`, then `LIBTPU_INIT_ARGS`.

    >>> flags_of({"XLA_FLAGS": "--xla_a=1 --xla_b"})
    {'xla_a': '1', 'xla_b': 'true'}
    """
    options: dict[str, str] = {}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for word in shlex.split(environment.get(name, "")):
            key, equals, value = word.lstrip("-").partition("=")
            options[key] = value if equals else "true"
    return options


def options_of(
    environment: Mapping[str, str], *given: Mapping[str, Any] | None
) -> dict[str, str]:
    """All options as text; later ones win over earlier ones."""
    options = flags_of(environment)
    for part in given:
        options.update({str(key): str(value) for key, value in (part or {}).items()})
    return options


def _priceable(chip: Chip | None) -> bool:
    return chip is not None and chip.memory_rate() is not None


def _on_host(sharding: Any) -> bool:
    return getattr(sharding, "memory_kind", None) in HOST_KINDS


def _shard_bytes(aval: Any, sharding: Any) -> int:
    """Bytes of one device's part; all of it where nobody says how it is spread."""
    shape = tuple(aval.shape)
    if isinstance(sharding, jax.sharding.Sharding):
        shape = sharding.shard_shape(shape)
    size = getattr(aval.dtype, "itemsize", 0)
    for axis in shape:
        size *= axis
    return int(size)


def _argument_path(path: Sequence[Any]) -> str:
    """`args[0]['w']`; the flattened tree is of positional and keyword arguments."""
    group, *rest = path
    name = "args" if group.idx == 0 else "kwargs"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _source_of_function(jitted: Any) -> str:
    """`file:line` where the step is defined, empty where nobody can say."""
    code = getattr(inspect.unwrap(jitted), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
