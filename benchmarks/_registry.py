"""Every benchmark: what it shows, what its figures are, and about how long it takes.

A module has `options(parser)`, `run(asked, records)`, which returns an exit code or
nothing, and, where its records make a table, `page(records)`, which returns Markdown.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark; `takes` is on two cores, from nothing."""

    module: str
    status: str
    takes: str
    what: str


BENCHMARKS = {
    "comparison": Benchmark(
        *("comparison", "simulated", "days"),
        "plans beside hand-written checkpoint policies: 17 rows, eight budgets each",
    ),
    "links": Benchmark(
        *("comparison_links", "simulated", "minutes"),
        "the programs of `comparison` that offload Q, K, V, over other host links",
    ),
    "fast_memory": Benchmark(
        *("fast_memory", "simulated", "an hour"),
        "twice libtpu's default VMEM per kernel, for plans and for policies",
    ),
    "budgets": Benchmark(
        *("budgets", "compiled", "hours"),
        "ten budgets, six models, two chips: is the budget kept and foretold?",
    ),
    "unrolled": Benchmark(
        *("unrolled", "compiled", "an hour"),
        "the same model scanned and as a Python loop",
    ),
    "straight": Benchmark(
        *("straight", "simulated", "hours"),
        "models that do not repeat: plans beside checkpoints by hand",
    ),
    "state": Benchmark(
        *("state", "compiled", "minutes"),
        "parameters, gradients and moments that do not fit the device",
    ),
    "llama13b": Benchmark(
        *("llama13b", "simulated", "half an hour"),
        "Llama2-13B on a v5p-8: seconds of planning (measured) and of a step",
    ),
    "simulation": Benchmark(
        *("simulation", "simulated", "ten minutes"),
        "simulated steps beside figures worked out by hand",
    ),
    "inspection": Benchmark(
        *("inspection", "compiled", "an hour"),
        "what `stowax.inspect` reads beside what the compiler says",
    ),
    "peaks": Benchmark(
        *("peaks", "compiled", "an hour"),
        "what is said to be in the way of a step, beside what compilers took",
    ),
    "differential": Benchmark(
        *("differential", "measured", "an hour"),
        "random steps, planned and unplanned: are the numbers the same?",
    ),
    "gpu": Benchmark(
        *("gpu", "measured", "an hour of a GPU"),
        "plans on a real GPU: numbers, bytes, seconds, known faults",
    ),
    "overhead": Benchmark(
        *("overhead", "measured", "minutes"),
        "what stowax costs: import, restart, dispatch",
    ),
    "reliability": Benchmark(
        *("reliability", "measured", "hours"),
        "kills, signals, damaged files, full disks: is anything lost?",
    ),
    "audit": Benchmark(
        *("audit_loops", "measured", "minutes"),
        "training loops with an audit's remedies, and what an audit costs",
    ),
    "ablation": Benchmark(
        *("ablation", "simulated", "a day"),
        "the search with one rule left out at a time",
    ),
}
