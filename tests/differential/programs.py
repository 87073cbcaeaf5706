"""A program and what is wished of its plan, as data, and how they are drawn.

Most parts of a program are usual and a few are not: a fault that many programs have
would hide every other if each program had everything.
"""

import dataclasses

from . import layer_control  # noqa: F401 - registers its operations
from .choosers import chance
from .layer_ops import OPS
from .meshes import MAPPED

LOOPS = (
    "scan",
    "python list",
    "python stacked",
    "scan reversed",
    "scan unused",
    "scan outputs",
    "scan unroll",
    "scan checkpoint",
    "scan key carry",
    "scan closure",
    "scan statistics",
    "nested scan",
    "two stacks",
    "encoder decoder",
    "fori loop",
    "shared weights",
    "python shared",
    "vmap examples",
)
FORMS = (
    "value_and_grad",
    "grad aux",
    "has_aux",
    "vjp",
    "argnums",
    "keyword arguments",
    "perturbed twice",
    "gan",
    "actor critic",
    "accumulate scan",
    "accumulate loop",
    "per example",
    "jit around",
    "jit of gradient",
    "checkpoint around",
    "scan around",
    "vmap around",
    "jacrev",
)
MEASURED = "measured"
AROUND = (
    "update",
    "ema",
    "previous",
    "finite cond",
    "finite where",
    "loss scale",
    "epoch scan",
    "gradients only",
    "frozen",
    "lora",
    "metrics",
    "debug print",
    "host call",
)
OPTIMIZERS = (
    "sgd",
    "momentum",
    "adam",
    "lion",
    "trust ratio",
    "lion normed",
    "lion skip",
    "lars",
    "old momentum",
    "anchor",
    "delayed",
    "clip first",
    "adam clipped update",
    "masked where",
    "optax sgd",
    "optax momentum",
    "optax adam",
    "optax adamw",
    "optax lion",
    "optax adafactor",
    "optax lamb",
    "optax clip adam",
    "optax adam clip",
    "optax accumulate",
    "optax injected",
    "optax if finite",
    "optax schedule",
)
MESHES = (
    "none",
    "one device",
    "auto",
    "explicit",
    "set mesh",
    "shard_map layers",
    "shard_map around",
)
DTYPES = ("float32", "mixed", "bfloat16", "mixed float16", "x64")
MARKS = ("whole", "none", "model", "several", "nested")
ENTRIES = ("plan", "jit")
ARGUMENTS = (
    "separate",
    "one state",
    "python rate",
    "numpy rate",
    "int64 batch",
    "none leaf",
    "typed key",
    "raw key",
    "key in state",
    "statistics in state",
    "called by keyword",
)
LOSSES = ("square", "cross entropy", "tied head")
SIZES = ("small", "by accident alike", "streamed")
HANDED = (
    "function",
    "jitted",
    "wrapper",
    "wrapper of jitted",
    "partial",
    "method",
    "object",
)
RESULTS = ("in order", "reversed")
GIVEN_AWAY = ("as wished", "a part")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training step in words. The first of every list of words is the simplest."""

    layer: tuple[str, ...] = ("matmul",)
    other: tuple[str, ...] = ()
    loop: str = LOOPS[0]
    loss: str = LOSSES[0]
    form: str = FORMS[0]
    around: str = AROUND[0]
    optimizer: str = OPTIMIZERS[0]
    mesh: str = MESHES[0]
    dtype: str = DTYPES[0]
    marks: str = MARKS[0]
    arguments: str = ARGUMENTS[0]
    size: str = SIZES[0]
    handed: str = HANDED[0]
    results: str = RESULTS[0]
    given_away: str = GIVEN_AWAY[0]
    layers: int = 2
    data: int = 0

    @property
    def features(self):
        """Every part, as the campaign counts them."""
        ops = sorted({*self.layer, *self.other})
        named = ("loop", "loss", "form", "around", "optimizer", "mesh", "dtype")
        named += ("marks", "arguments", "size", "handed", "results", "given_away")
        return [f"layer: {name}" for name in ops] + [
            f"{name}: {getattr(self, name)}" for name in named
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is asked of a plan; `budget` is a part of what the plain step takes."""

    target: str = "cpu"
    budget: float | None = None
    host_budget: float | None = None
    pin: tuple[tuple[str, str], ...] = ()
    forbid: tuple[str, ...] = ()
    donate: bool | None = None
    keep_checkpoint: bool = False
    roll: bool = True
    entry: str = ENTRIES[0]

    @property
    def features(self):
        """Every part, as the campaign counts them."""
        told = [
            f"entry: {self.entry}",
            f"target: {self.target}",
            f"budget: {self.budget}",
        ]
        told += [f"pin: {a} {b}" for a, b in self.pin] or ["pin: none"]
        told += [f"forbid: {word}" for word in self.forbid]
        told += [f"donate: {self.donate}"]
        if self.host_budget is not None:
            told.append("host budget")
        if self.keep_checkpoint:
            told.append("keep_checkpoint")
        if not self.roll:
            told.append("roll: False")
        return told


def draw(chooser):
    """A program and wishes of it."""
    program = draw_program(chooser)
    wishes = draw_wishes(chooser, program)
    # Last: the seeds of records made before these parts were there name such programs.
    handed = chooser.choose(HANDED[1:]) if chance(chooser, 3) else HANDED[0]
    changes = {"handed": handed}
    if program.arguments == "separate" and program.around != "gradients only":
        changes["results"] = RESULTS[chance(chooser, 4)]
        if handed == "function":
            changes["given_away"] = GIVEN_AWAY[chance(chooser, 3)]
    if program.form == "has_aux" and program.mesh != "shard_map around":
        changes["form"] = MEASURED if chance(chooser, 2) else program.form
    if program.mesh == "shard_map around" and chance(chooser, 2):
        changes["mesh"] = MAPPED
    return dataclasses.replace(program, **changes), wishes


def draw_program(chooser):
    """Each part is unusual once in a while; the layer has one to four operations."""

    def part(words, once_in=4):
        return chooser.choose(words[1:]) if chance(chooser, once_in) else words[0]

    usual = ("matmul", "tanh", "gelu", "mlp", "rms norm", "silu")
    names = tuple(OPS)

    def ops(least, most):
        count = chooser.choose(range(least, most + 1))
        return tuple(
            chooser.choose(names if chance(chooser, 3) else usual) for _ in range(count)
        )

    loop = part(LOOPS, 2)
    program = Program(
        layer=("matmul", *ops(1, 3)),
        other=ops(1, 2) if loop in ("two stacks", "encoder decoder") else (),
        loop=loop,
        loss=part(LOSSES),
        form=part(FORMS, 3),
        around=part(AROUND),
        optimizer=chooser.choose(OPTIMIZERS),
        mesh=part(MESHES, 6),
        dtype=part(DTYPES, 5),
        marks=part(MARKS, 2),
        arguments=part(ARGUMENTS, 4),
        size=chooser.choose((*SIZES, "streamed", "streamed", "small")),
        layers=chooser.choose((2, 3, 4, 6)),
        data=chooser.choose(range(1000)),
    )
    return settled(program)


_TARGETS = ("h200", "cpu", "h200", "v5p-8", "h200", "h200")
_STAYING = (
    (("activation", "recompute"),),
    (("activation", "keep"),),
    (("optimizer state", "keep"),),
    (("*layer_ops.py*", "recompute"),),
    (("parameter", "keep"), ("activation", "recompute")),
)
_OFFLOADING = (
    (("optimizer state", "offload"),),
    (("parameter", "offload"),),
    (("activation", "offload"),),
    (("parameter", "offload"), ("optimizer state", "offload")),
    (("activation", "offload"), ("optimizer state", "offload")),
    (("*layer_ops.py*", "offload"),),
    (("*layers*w*", "offload"),),
)
_BUDGETS = (None, 1.3, 0.9, 0.7, 0.7, 0.5, 0.5, 0.35, 0.2)
_FORBID = (("offload",), ("recompute",), ("host update",), ("offload:parameter",))


def draw_wishes(chooser, program):
    """Pins more often than not: a budget alone moves little of what is tiny.

    Without a budget nothing tiny is worth a copy, so what offloads has one.
    """
    # What is spread over the attached devices is planned for them.
    target = chooser.choose(_TARGETS) if program.mesh == "none" else "cpu"
    # The CPU has no host memory of its own; a TPU copies whole tiles.
    pins = _OFFLOADING + _STAYING if target == "h200" else _STAYING
    pin = chooser.choose(pins) if chance(chooser, 2) else ()
    budget = chooser.choose(_BUDGETS)
    if budget is None and "offload" in dict(pin).values():
        budget = 1.3
    donate = chooser.choose((None, None, None, True, False))
    if program.around == "gradients only":
        donate = donate and None  # its parameters are given again
    return Wishes(
        target=target,
        budget=budget,
        host_budget=0.3 if chance(chooser, 16) else None,
        pin=pin,
        forbid=() if pin or not chance(chooser, 4) else chooser.choose(_FORBID),
        donate=donate,
        keep_checkpoint=chance(chooser, 10),
        roll=not chance(chooser, 10),
        entry=ENTRIES[1] if chance(chooser, 3) else ENTRIES[0],
    )


_NOT_EXPLICIT = ("embedding", "argmax", "solve", "conv", "searchsorted", "segment sum")


def settled(program):
    """The program with parts replaced that cannot be together."""
    changes = {}
    form, mesh = program.form, program.mesh
    if program.loop in ("nested scan",) and program.layers % 2:
        changes["layers"] = program.layers + 1
    if mesh not in ("none", "one device"):
        # One axis over examples, which these forms take apart.
        split = ("accumulate scan", "accumulate loop", "scan around", "vmap around")
        if form in (*split, "per example", "jacrev"):
            changes["form"] = "value_and_grad"
        if program.loop == "vmap examples":
            changes["loop"] = "scan"
        if program.around == "epoch scan":
            changes["around"] = "update"
    if mesh in ("explicit", "set mesh"):
        # JAX cannot tell where the results of these are to lie.
        usable = lambda ops: tuple(o for o in ops if o not in _NOT_EXPLICIT)
        changes["layer"] = usable(program.layer) or ("matmul",)
        changes["other"] = usable(program.other)
        if program.loss == "tied head":
            changes["loss"] = "cross entropy"
    if mesh == "shard_map around" and program.marks == "several":
        changes["marks"] = "whole"
    if form == "keyword arguments" and program.marks == "several":
        changes["marks"] = "whole"
    return dataclasses.replace(program, **changes)


_PARTS = {
    "mesh": (*MESHES, MAPPED),
    "loop": LOOPS,
    "form": (*FORMS, MEASURED),
    "around": AROUND,
    "arguments": ARGUMENTS,
    "dtype": DTYPES,
    "marks": MARKS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "handed": HANDED,
    "results": RESULTS,
    "given_away": GIVEN_AWAY,
}


def one_by_one():
    """Programs with one unusual part each: what fails here is simple already.

    Half of what they take makes each of them move something.
    """
    usual = Program(layer=("matmul", "tanh"), layers=4, size="streamed")
    usual = dataclasses.replace(usual, other=("mlp",), optimizer="momentum")
    parts = [{name: word} for name, words in _PARTS.items() for word in words]
    parts += [{"layer": ("matmul", name)} for name in OPS]
    made = []
    for part in parts:
        program = settled(dataclasses.replace(usual, **part))
        if program.loop not in ("two stacks", "encoder decoder"):
            program = dataclasses.replace(program, other=())
        target = "h200" if program.mesh == "none" else "cpu"
        pin = () if target == "h200" else (("activation", "recompute"),)
        made.append((program, Wishes(target=target, budget=0.5, pin=pin)))
    return list(dict.fromkeys(made))
