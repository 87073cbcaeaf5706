"""What the pages measure with: one program on three machines, and one kind of table.

`inspect_all` compiles a program for a CPU, a TPU v5p and an H200; the last two need not
be there. `device` and `host` take one figure out of what it found; `plan_all` and
`of_plans` do the same with plans. `print_table` sets such rows beside what JAX's own
tutorial publishes.

Figures are XLA's own, per device. `total` is arguments + outputs − aliased +
temporaries: what a step needs while it runs.
"""

import operator

import stowax

MACHINES = ("cpu", "v5p-8", "h200")
MIB = ("MiB", 2**20)
GIB = ("GiB", 2**30)
MILLISECONDS = ("ms", 1e-3)


def inspect_all(build, machines=MACHINES):
    """Name of a machine -> the `stowax.Inspection` of what `build(machine)` returns.

    `build` takes a `Target` and returns a jitted function and the specs of its
    arguments, placed on that target.
    """
    found = {}
    for name in machines:
        machine = stowax.target(name)
        jitted, *specs = build(machine)
        found[name] = stowax.inspect(jitted, *specs, target=machine)
    return found


def plan_all(step, *specs, machines=MACHINES[1:], **wishes):
    """Name of a machine -> the `stowax.Plan` of `step` for it.

    Four programs at most: a fifth of a TPU's step would go to compiler options that
    steps by hand gain as much by (more fast memory for kernels).
    """
    wishes = {"compiles": 4, "progress": False, **wishes}
    return {name: stowax.plan(step, *specs, target=name, **wishes) for name in machines}


def of_plans(plans, field):
    """One field of the plan for each machine; of a part: `"proof.exposed_seconds"`."""
    return _each(plans, operator.attrgetter(field))


def device(found, part="total"):
    """Bytes of device memory per machine: `argument`, `output`, `temp` or `total`."""
    return _each(found, lambda one: getattr(one.memory.device, part))


def host(found, part="total"):
    """Bytes of host memory per machine."""
    return _each(found, lambda one: getattr(one.memory.host, part))


def step_seconds(found):
    """Simulated seconds of one step per machine; none for the CPU."""
    return [None, *_each(found, lambda one: one.timeline.step_seconds)[1:]]


def waiting_seconds(found):
    """The part of `step_seconds` that is spent waiting for copies."""
    return [None, *_each(found, lambda one: one.timeline.exposed_seconds)[1:]]


def _each(found, read):
    return [read(found[name]) if name in found else None for name in MACHINES]


def print_table(unit, *rows):
    """One line per row: `(label, one value per machine)`, and what is published."""
    name, size = unit
    published = any(len(row) > 2 for row in rows)
    columns = [*MACHINES, "published"] if published else MACHINES
    width = max(len(label) for label, *_ in rows)
    print(f"{name:{width}}", *(f"{column:>9}" for column in columns))
    for label, values, *known in rows:
        cells = ["–" if value is None else f"{value / size:.2f}" for value in values]
        if published:
            cells.append(f"{known[0]:.2f}" if known else "–")
        print(f"{label:{width}}", *(f"{cell:>9}" for cell in cells))
