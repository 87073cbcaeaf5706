"""Problems for the planner's tests: small random ones, and Llama-like bodies."""

import dataclasses

import hypothesis.strategies as st

from stowax._records._stages import (
    Body,
    HostUpdate,
    Link,
    Operation,
    Passage,
    Point,
    Problem,
    Value,
)

EVERY = frozenset({"keep", "offload", "recompute"})
STORE = frozenset({"keep", "offload"})
GIB = 2**30


def value(index, *, bytes=8, operation=None, needed=False, allowed=None, **more):
    """A value with the defaults of a test: an input cannot be recomputed."""
    if allowed is None:
        allowed = STORE if operation is None else EVERY
    fields = {
        "name": f"v{index}",
        "source": f"model.py:{index + 1}",
        "shape": (bytes,),
        "dtype": "uint8",
        "available": False,
    }
    return Value(
        index=index,
        bytes=bytes,
        operation=operation,
        needed=needed,
        allowed=frozenset(allowed),
        **{**fields, **more},
    )


def operation(index, inputs, outputs, seconds=1.0, *, repeatable=True):
    """An operation `op<index>`."""
    return Operation(
        index=index,
        primitive=f"op{index}",
        source=f"model.py:{index + 1}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        seconds=seconds,
        repeatable=repeatable,
    )


def chain(count=10, *, needed=(1, 2, 3), bytes=8, name="layer", **more):
    """Input v0, then v1..v3 each made from the one before in one second."""
    values = [value(0, bytes=bytes, needed=True)]
    values += [
        value(i, bytes=bytes, operation=i - 1, needed=i in needed) for i in (1, 2, 3)
    ]
    fields = {
        "values": tuple(values),
        "operations": tuple(operation(i, (i,), (i + 1,)) for i in range(3)),
        "forward_seconds": 3.0,
        "backward_seconds": 6.0,
        "points": (Point(reserved_bytes=0, live=(0, 1, 2, 3)),),
    }
    return Body(name=name, count=count, **{**fields, **more})


def problem(*bodies, device_bytes=10**9, host_bytes=10**9, rate=8.0, **more):
    """A problem of `bodies` with a link of `rate` bytes per second each way."""
    return Problem(
        bodies=tuple(bodies),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        link=Link(device_to_host=rate, host_to_device=rate),
        **{"loss_reserved_bytes": 0, "other_seconds": 0.0, **more},
    )


def replaced(body, index, **more):
    """`body` with fields of one value replaced."""
    values = list(body.values)
    values[index] = dataclasses.replace(values[index], **more)
    return dataclasses.replace(body, values=tuple(values))


@st.composite
def small_bodies(draw, name="layer", most_operations=4):
    """Bodies of up to two inputs and a few operations, some with two outputs."""
    values = [
        value(i, bytes=draw(st.integers(1, 40))) for i in range(draw(st.integers(1, 2)))
    ]
    if draw(st.booleans()):
        values[-1] = dataclasses.replace(
            values[-1], available=len(values) > 1, allowed=frozenset(STORE)
        )
    storing = draw(st.sampled_from([0, 0, 0.01, 0.1]))  # seconds per byte
    operations = []
    for f in range(draw(st.integers(1, most_operations))):
        inputs = draw(
            st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=2)
        )
        outputs = range(len(values), len(values) + draw(st.integers(1, 2)))
        operations.append(
            operation(
                f,
                inputs,
                outputs,
                draw(st.integers(0, 8)) / 4,
                repeatable=draw(st.integers(0, 9)) > 0,
            )
        )
        for i in outputs:
            allowed = draw(st.sampled_from([EVERY, EVERY, EVERY - {"offload"}]))
            values.append(
                value(
                    i,
                    bytes=draw(st.integers(1, 40)),
                    operation=f,
                    allowed=allowed,
                    needed=draw(st.booleans()),
                )
            )
    values = [
        dataclasses.replace(
            v,
            keep_seconds=storing * v.bytes,
            offload_seconds=draw(st.sampled_from([0, 2])) * storing * v.bytes,
            keep_more=draw(st.sampled_from([0, 0, -1, 8])),
            offload_more=draw(st.sampled_from([0, 0, 5])),
        )
        for v in values
    ]
    points = tuple(
        Point(
            reserved_bytes=draw(st.integers(0, 60)),
            live=tuple(sorted(draw(st.sets(st.sampled_from(range(len(values))))))),
        )
        for _ in range(draw(st.integers(0, 3)))
    )
    return Body(
        name=name,
        count=draw(st.integers(1, 5)),
        values=tuple(values),
        operations=tuple(operations),
        forward_seconds=draw(st.integers(0, 8)) / 4,
        backward_seconds=draw(st.integers(0, 12)) / 4,
        points=points,
        in_loop=draw(st.integers(0, 4)) > 0,
    )


def state(*sizes, seconds=0.0, reserved=0, allowed=STORE, passages=(), host_updates=()):
    """A body of the phase "update" with arrays of these bytes.

    The first of them passes through layers as `passages` say.
    """
    return Body(
        name="state",
        count=1,
        values=tuple(
            value(
                i,
                bytes=n,
                needed=True,
                allowed=allowed,
                role="optimizer state",
                update_in=n,
                update_out=n,
                passages=tuple(passages) if i == 0 else (),
            )
            for i, n in enumerate(sizes)
        ),
        operations=(),
        forward_seconds=0.0,
        backward_seconds=seconds,
        points=(Point(reserved_bytes=reserved, live=()),),
        phase="update",
        host_updates=tuple(host_updates),
    )


def on_host(sizes, *values, seconds, rate=8.0):
    """The part of an update of arrays of these bytes that the host may do."""
    moved = sum(sizes[i] for i in values)
    return HostUpdate(
        values=values,
        update_in=moved,
        update_out=moved,
        seconds=seconds,
        stream_seconds=moved / rate,
    )


@st.composite
def host_parts(draw, sizes):
    """Parts of an update for the host, of different values; perhaps none."""
    values = draw(st.permutations(range(len(sizes))))
    cut = draw(st.integers(0, len(sizes)))
    return [
        on_host(sizes, *sorted(own), seconds=draw(st.integers(0, 12)) / 2)
        for own in (values[:cut], values[cut:])
        if own and draw(st.booleans())
    ]


@st.composite
def small_problems(draw, most_bodies=2):
    """One body of up to four operations, or two of up to two; perhaps state."""
    if draw(st.integers(1, most_bodies)) == 1:
        bodies = [draw(small_bodies())]
    else:
        bodies = [
            draw(small_bodies(n, most_operations=2)) for n in ("encoder", "decoder")
        ]
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
        allowed = draw(st.sampled_from([STORE, STORE, {"keep"}]))
        seconds = draw(st.integers(0, 8)) / 4
        reserved = draw(st.integers(0, 300))
        passages = [
            Passage(
                body=body.name,
                forward_in=draw(st.integers(0, 30)),
                backward_in=draw(st.integers(0, 30)),
                backward_out=draw(st.integers(0, 30)),
            )
            for body in bodies
            if draw(st.booleans())
        ]
        bodies.insert(
            0,
            state(
                *sizes,
                seconds=seconds,
                reserved=reserved,
                allowed=allowed,
                passages=passages,
                host_updates=draw(host_parts(sizes)),
            ),
        )
    return problem(
        *bodies,
        device_bytes=draw(st.integers(1, 700)),
        host_bytes=draw(st.sampled_from([0, 60, 200, 10**6])),
        rate=float(draw(st.sampled_from([4, 20, 60]))),
        loss_reserved_bytes=draw(st.integers(0, 60)),
        other_seconds=float(draw(st.integers(0, 2))),
        prefetch_depth=draw(st.sampled_from([1, 2, 2])),
    )
