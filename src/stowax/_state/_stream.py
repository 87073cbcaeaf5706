"""A step whose state waits in host memory, as a function that `jax.jit` can take.

`stream_state` wraps the user's step (marked functions rewritten already). When it is
traced, it traces the step with everything on the device, finds in that jaxpr what works
on the state (`_update._find`), and runs it again with the state in blocks
(`_update._run`). Nothing of this is left at run time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._errors import PlanMismatchError
from .._jax_donation import overwriting
from .._jaxprs._jaxpr import spec_of, trace, typed_as
from .._layers._boundary import Emission
from .._layers._host_layers import Partition
from .._records._plan import ArgumentRecord, Streaming
from .._update._blocks import BlockSize
from .._update._find import stream_update
from .._update._run import run_streamed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """The arguments that live in host memory.

    `updates` says which output takes the place of each (both flat positions), `None` of
    those that are only read, `shards` has the shape of one device's part of each,
    `partitions` how those that are spread over a mesh are spread, `orders` how those
    lie that do not lie as they are typed (`_axis_order`), `size` how all are cut.
    `in_turn`, `lean`, `late` and `on_host` are what `run_streamed` takes, `returned` is
    what `stream_update` does: gradients may come out in host memory.
    """

    updates: Mapping[int, int | None]
    shards: Mapping[int, tuple[int, ...]]
    partitions: Mapping[int, Partition]
    in_turn: bool
    orders: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    size: BlockSize = dataclasses.field(default_factory=BlockSize)
    lean: bool = False
    on_host: tuple[int, ...] = ()
    late: bool = True
    returned: bool = False


def hosted_of(
    arguments: Sequence[ArgumentRecord],
    streaming: Streaming,
    platform: str,
    device_kind: str,
) -> Hosted | None:
    """Those of a plan's `arguments` that live in host memory; `None`: none do.

    `device_kind` is what JAX calls the devices that the plan was made for.
    """
    mine = {i: a for i, a in enumerate(arguments) if a.memory_kind != "device"}
    if not mine:
        return None
    return Hosted(
        updates={i: a.output for i, a in mine.items()},
        shards={i: a.shard for i, a in mine.items()},
        partitions={i: a.partition for i, a in mine.items() if a.partition is not None},
        orders={i: a.order for i, a in mine.items() if a.order is not None},
        in_turn=platform != "tpu",
        lean=streaming.lean,
        on_host=tuple(i for i, a in mine.items() if a.on_host),
        late=streaming.late,
        returned=streaming.gradients_on_host,
        size=BlockSize.least(streaming.least_bytes, platform, device_kind),
    )


def stream_state(
    step: Callable[..., Any], hosted: Hosted, boundary: dict[str, Emission]
) -> Callable[..., Any]:
    """`step`, with the arguments that `hosted` names in host memory, and returned so.

    Those that are only read stay where they are; they need not be donated.

    **Arguments:** `boundary` is where the step registers the loops of its stacks.

    **Raises:** when it is traced, `PlanMismatchError` for an argument that is on the
    device.
    """

    @functools.wraps(step)
    def streaming(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten_with_path(args)
        values = [leaf for _, leaf in leaves]
        results: list[Any] = []

        def flat(*given: Any) -> Any:
            out, tree = jax.tree.flatten(step(*jax.tree.unflatten(structure, given)))
            results.append(tree)
            return out

        for i in hosted.updates:
            path, leaf = leaves[i]
            if not _jax.in_host_memory(leaf):
                name = _jax.argument_path(path)
                raise PlanMismatchError(
                    f"step: {name} is in device memory, and the plan keeps it "
                    "in host memory. Call the step with what plan.place(...) returns."
                )
        boundary.clear()
        # Without a memory kind: traced as if everything were on the device.
        jaxpr = trace(flat, *(spec_of(_jax.aval_of(value)) for value in values))
        streamed = stream_update(
            jaxpr,
            hosted.updates,
            per_device=hosted.shards,
            orders=hosted.orders,
            size=hosted.size,
            boundary=boundary,
            returned=hosted.returned,
        )
        for leaf in streamed.leaves:
            if leaf.way == "device":
                name = _jax.argument_path(leaves[leaf.input][0])
                raise PlanMismatchError(
                    f"step: {name} is in host memory by the "
                    f"plan, and cannot be in this step: {leaf.reason}. Apply the plan "
                    "to the step that it was made for, whose results came in the "
                    "same order."
                )
        out = run_streamed(
            dataclasses.replace(streamed, partitions=hosted.partitions),
            values,
            in_turn=hosted.in_turn,
            boundary=boundary,
            lean=hosted.lean,
            on_host=hosted.on_host,
            late=hosted.late,
        )
        types = (variable.aval for variable in _jax.open_jaxpr(jaxpr).outvars)
        out = [typed_as(value, aval) for value, aval in zip(out, types, strict=True)]
        out = overwriting(values, out, hosted.updates)
        return jax.tree.unflatten(results[-1], out)

    return streaming
