"""stowax: a stowage plan for the arrays of a JAX training step.

In pipeline order: mark the differentiated function, name the machine, plan, look.
"""

from ._mark import stow as stow
from ._target import target as target
from ._target import targets as targets
from ._plan import Plan as Plan
from ._plan import load_plan as load_plan
from ._plan import plan as plan
from ._inspect import inspect as inspect
from ._errors import StowaxError as StowaxError
