"""Bodies of the size of a Llama layer, for the planner's tests."""

import dataclasses

from planner_problems import EVERY, GIB, STORE, operation, problem, value
from stowax._records._stages import Body, Point


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
