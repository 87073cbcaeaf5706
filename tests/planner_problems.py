"""Problems for the planner's tests: small random ones, and Llama-like bodies."""

import dataclasses

import hypothesis.strategies as st

from stowax._stages import Body, Link, Operation, Point, Problem, Value

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


def state(*sizes, seconds=0.0, reserved=0, allowed=STORE):
    """A body of the phase "update" with arrays of these bytes."""
    return Body(
        name="state",
        count=1,
        values=tuple(
            value(i, bytes=n, needed=True, allowed=allowed, role="optimizer state")
            for i, n in enumerate(sizes)
        ),
        operations=(),
        forward_seconds=0.0,
        backward_seconds=seconds,
        points=(Point(reserved_bytes=reserved, live=()),),
        phase="update",
    )


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
        sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
        allowed = draw(st.sampled_from([STORE, STORE, {"keep"}]))
        seconds = draw(st.integers(0, 8)) / 4
        reserved = draw(st.integers(0, 300))
        bodies.insert(
            0, state(*sizes, seconds=seconds, reserved=reserved, allowed=allowed)
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


class LayerWriter:
    """Writes a body operation by operation, with roofline seconds of a chip.

    Source of the default figures: H100 SXM, 989 TFLOP/s bf16 dense and 3350 GB/s
    (NVIDIA's data sheet), at 60 % and 80 % of them.
    """

    def __init__(self, flops=989e12 * 0.6, bytes_per_second=3350e9 * 0.8):
        self.flops, self.bandwidth = flops, bytes_per_second
        self.values, self.operations = [], []

    def input(self, name, bytes, *, available=False, needed=False):
        self.values.append(
            value(
                len(self.values),
                name=name,
                bytes=bytes,
                available=available,
                needed=needed,
                allowed=frozenset() if available else STORE,
            )
        )
        return len(self.values) - 1

    def make(self, primitive, inputs, bytes, *, flops=0.0, name=None, outputs=1):
        """Adds an operation; returns its value, or a list of several."""
        sizes = bytes if isinstance(bytes, tuple) else (bytes,) * outputs
        first = len(self.values)
        moved = sum(sizes) + sum(self.values[i].bytes for i in inputs)
        made = list(range(first, first + len(sizes)))
        self.operations.append(
            dataclasses.replace(
                operation(
                    len(self.operations),
                    inputs,
                    made,
                    max(flops / self.flops, moved / self.bandwidth),
                ),
                primitive=primitive,
            )
        )
        for i, size in zip(made, sizes, strict=True):
            self.values.append(
                value(
                    i,
                    name=name or primitive,
                    bytes=size,
                    operation=len(self.operations) - 1,
                    allowed=EVERY if size >= 2**20 else EVERY - {"offload"},
                )
            )
        return made[0] if len(made) == 1 else made

    def need(self, *indices):
        for i in indices:
            if not self.values[i].available:
                self.values[i] = dataclasses.replace(self.values[i], needed=True)

    def body(self, name, count, reserved_bytes, backward=2.0, **more):
        """The body; a backward operation sees what was made before its forward one."""
        forward = sum(f.seconds for f in self.operations)
        points = tuple(
            Point(
                reserved_bytes=reserved_bytes
                + 2 * sum(self.values[i].bytes for i in f.outputs),
                live=tuple(range(max(f.outputs) + 1)),
            )
            for f in self.operations
        )
        return Body(
            name=name,
            count=count,
            values=tuple(self.values),
            operations=tuple(self.operations),
            forward_seconds=forward,
            backward_seconds=backward * forward,
            points=points,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a transformer layer on one device."""

    tokens: int = 8192
    sequence: int = 8192
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    hidden: int = 14336


def _norm(w, x, shape, name):
    """RMS normalisation in float32 as JAX traces it."""
    wide, one = 4 * shape.tokens * shape.width, 4 * shape.tokens
    up = w.make("convert_element_type", (x,), wide, name=f"{name}.wide")
    square = w.make("square", (up,), wide, name=f"{name}.square")
    total = w.make("reduce_sum", (square,), one, name=f"{name}.sum")
    mean = w.make("div", (total,), one, name=f"{name}.mean")
    safe = w.make("add", (mean,), one, name=f"{name}.safe")
    inverse = w.make("rsqrt", (safe,), one, name=f"{name}.inverse")
    spread = w.make("broadcast_in_dim", (inverse,), one, name=f"{name}.spread")
    scaled = w.make("mul", (up, spread), wide, name=f"{name}.scaled")
    down = w.make("convert_element_type", (scaled,), wide // 2, name=f"{name}.down")
    scale = w.input(f"{name}.scale", 2 * shape.width, available=True)
    w.need(up, inverse, spread, down, square)
    return w.make("mul", (down, scale), wide // 2, name=name)


def _dot(w, x, shape, outer, inner, name):
    weight = w.input(f"{name}.weight", 2 * inner * outer, available=True)
    w.need(x)
    return w.make(
        "dot_general",
        (x, weight),
        2 * shape.tokens * outer,
        flops=2.0 * shape.tokens * inner * outer,
        name=name,
    )


def _rotate(w, x, shape, width, name):
    """Rotary embedding: two halves, four products, two sums, joined again."""
    size = 2 * shape.tokens * width
    cos = w.input(f"{name}.cos", 2 * shape.tokens * 64, available=True)
    sin = w.input(f"{name}.sin", 2 * shape.tokens * 64, available=True)
    folded = w.make("reshape", (x,), size, name=f"{name}.folded")
    left = w.make("slice", (folded,), size // 2, name=f"{name}.left")
    right = w.make("slice", (folded,), size // 2, name=f"{name}.right")
    a = w.make("mul", (left, cos), size // 2, name=f"{name}.a")
    b = w.make("mul", (right, sin), size // 2, name=f"{name}.b")
    c = w.make("mul", (right, cos), size // 2, name=f"{name}.c")
    d = w.make("mul", (left, sin), size // 2, name=f"{name}.d")
    one = w.make("sub", (a, b), size // 2, name=f"{name}.one")
    two = w.make("add", (c, d), size // 2, name=f"{name}.two")
    joined = w.make("concatenate", (one, two), size, name=f"{name}.joined")
    return w.make("transpose", (joined,), size, name=name)


def llama_layer(count=32, shape=None, name="layer", cross=False, **writer):
    """A Llama layer of 60 operations; `cross`: with a second attention."""
    s = shape or Shape()
    w = LayerWriter(**writer)
    small, key_width = 2 * s.tokens * s.width, s.key_heads * (s.width // s.heads)
    x = w.input("x", small)
    for part in ("attention", "cross")[: 1 + cross]:
        n = _norm(w, x, s, f"{part}.norm")
        q = _rotate(
            w,
            _dot(w, n, s, s.width, s.width, f"{part}.q"),
            s,
            s.width,
            f"{part}.q_rotated",
        )
        k = _rotate(
            w,
            _dot(w, n, s, key_width, s.width, f"{part}.k"),
            s,
            key_width,
            f"{part}.k_rotated",
        )
        v = _dot(w, n, s, key_width, s.width, f"{part}.v")
        v = w.make("transpose", (v,), 2 * s.tokens * key_width, name=f"{part}.v_heads")
        out, log_sum = w.make(
            "flash_attention",
            (q, k, v),
            (small, 4 * s.tokens * s.heads),
            flops=2.0 * s.tokens * s.sequence * s.width,
            name=f"{part}.out",
        )
        w.need(q, k, v, out, log_sum)
        flat = w.make("reshape", (out,), small, name=f"{part}.flat")
        o = _dot(w, flat, s, s.width, s.width, f"{part}.o")
        x = w.make("add", (x, o), small, name=f"{part}.residual")
    n = _norm(w, x, s, "mlp.norm")
    gate = _dot(w, n, s, s.hidden, s.width, "mlp.gate")
    up = _dot(w, n, s, s.hidden, s.width, "mlp.up")
    big = 2 * s.tokens * s.hidden
    half = w.make("logistic", (gate,), big, name="mlp.logistic")
    silu = w.make("mul", (gate, half), big, name="mlp.silu")
    product = w.make("mul", (silu, up), big, name="mlp.product")
    w.need(gate, half, silu, up)
    down = _dot(w, product, s, s.width, s.hidden, "mlp.down")
    w.make("add", (x, down), small, name="mlp.residual")
    return w.body(name, count, reserved_bytes=small)


def h100(*bodies, device_bytes, host_bytes=200 * GIB, rate=55e9, **more):
    """A problem on an H100: 55 GB/s measured per direction (planning model's table)."""
    return problem(
        *bodies,
        device_bytes=int(device_bytes),
        host_bytes=int(host_bytes),
        rate=rate,
        **more,
    )
