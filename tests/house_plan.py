"""The house plan as data: layers from the bottom up, and who may know JAX."""

SHIMS = (
    *("_jax", "_jax_autodiff", "_jax_donation", "_jax_hooks", "_jax_host_memory"),
    *("_jax_jit", "_jax_layouts", "_jax_primitives", "_jax_processes"),
    *("_jax_targets", "_mlir"),
)
"""The files that follow JAX's internals from version to version."""

# Imports point to lower layers, or to the same layer where that makes no circle. A name
# is a module or a package directly below `src/stowax`.
LAYERS = (
    (
        *("_errors", "_files", "_misspelt", "_record_json", "_scopes", "_streams"),
        *("_units", "_watcher", "_where"),
    ),
    ("_records",),
    # Figures with sources, and the files that touch private JAX.
    (
        *("_hardware", "_mark", "_numpy_hooks", "_versions"),
        *SHIMS,
    ),
    ("integrations", "report"),
    # Two readers: of compiled programs, and of jaxprs.
    ("_hlo", "_jaxprs"),
    # The machine, and how long it takes.
    ("_cost", "_target", "_timing"),
    # The step as it is evaluated with its layers in loops, its state in host memory.
    ("_layers",),
    ("_update",),
    ("_calling", "_step"),
    # Each knows one thing: a decision, memory, the state, what a program really does.
    ("_hazards", "_planner", "_predict", "_state"),
    ("_inspect", "_survey"),
    ("_audit", "_feeding", "_trial"),
    ("_search",),
    ("_explain",),
    ("_plan",),
    ("_calibrate", "_fit", "_jit", "_verify", "_way"),
    ("__init__",),
    ("_cli",),
    ("__main__",),
)

# These know no JAX, and import only one another: a plan made on a TPU host is read,
# solved and reported anywhere. A module of a package stands here for itself.
WITHOUT_JAX = {
    *("_errors", "_files", "_record_json", "_scopes", "_units", "_watcher", "_where"),
    *(
        "_records",
        "_hardware",
        "integrations",
        "report",
        "_hlo",
        "_hazards",
        "_planner",
        "_predict",
    ),
    "_audit._allow",
    "_audit._find",
    "_audit._host_memory",
    "_audit._memory",
    "_audit._pace",
    "_audit._programs",
    "_audit._sampler",
    "_audit._staging",
    "_audit._steps",
    "_audit._transfers",
    "_calibrate._stopwatch",
    "_inspect._ledger",
    "_inspect._memory_curve",
    "_inspect._memory_roles",
    "_jaxprs._periods",
    "_survey._near_names",
    "_survey._pin_starts",
    "_survey._preferences",
    "_survey._travel",
    "_target._calibration_file",
    "_timing._measured",
    "_timing._simulate",
    "_timing._xplane",
    "_timing._xplane_roles",
}
