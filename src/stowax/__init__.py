"""stowax: a stowage plan for the arrays of a JAX training step.

In pipeline order: mark the differentiated function, name the machine, plan, look.
Everything is loaded when it is first asked for, JAX too: a training script that only
marks its loss pays for nothing else, and `stowax --help` for nothing at all.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._errors import StowaxError as StowaxError
from ._misspelt import naming_options as _naming_options

if TYPE_CHECKING:
    from ._mark import stow as stow
    from ._target._target import target as target
    from ._target._target import targets as targets
    from ._calibrate._calibrate import calibrate as calibrate
    from ._plan._plan import Plan as Plan
    from ._plan._plan import load_plan as load_plan
    from ._plan._planning import plan as plan
    from ._plan._planning import plans as plans
    from ._fit._fit import Fit as Fit
    from ._fit._fit import fit as fit
    from ._jit._jit import jit as jit
    from ._jit._session import planning as planning
    from ._verify._verify import verify as verify
    from ._way._inspect import inspect as inspect
    from ._inspect._inspect import load_inspection as load_inspection
    from ._timing._measure import measure as measure
    from ._audit._audit import Audit as Audit
    from ._audit._audit import audit as audit
    from ._feeding._prefetch import prefetch as prefetch
    from ._feeding._strict import strict as strict

_LATER = {
    "stow": "_mark",
    "target": "_target._target",
    "targets": "_target._target",
    "calibrate": "_calibrate._calibrate",
    "Plan": "_plan._plan",
    "load_plan": "_plan._plan",
    "plan": "_plan._planning",
    "plans": "_plan._planning",
    "Fit": "_fit._fit",
    "fit": "_fit._fit",
    "jit": "_jit._jit",
    "planning": "_jit._session",
    "verify": "_verify._verify",
    "inspect": "_way._inspect",
    "load_inspection": "_inspect._inspect",
    "measure": "_timing._measure",
    "Audit": "_audit._audit",
    "audit": "_audit._audit",
    "prefetch": "_feeding._prefetch",
    "strict": "_feeding._strict",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'stowax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    value = _naming_options(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["StowaxError", *_LATER])
