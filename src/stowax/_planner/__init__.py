"""Decides keep, offload or recompute per value: the model, its solver, its baselines.

Pure numbers on the records of `_stages`; no JAX. In the order of use:
"""

from ._baselines import Predicate as Predicate
from ._baselines import baselines as baselines
from ._baselines import named as named
from ._changes import allowed as allowed
from ._changes import single_changes as single_changes
from ._evaluate import MISTAKEN as MISTAKEN
from ._evaluate import evaluate as evaluate
from ._evaluate import operations_run_again as operations_run_again
from ._evaluate import recomputed_values as recomputed_values
from ._evaluate import turnover as turnover
from ._pins import check_problem as check_problem
from ._policies import policies as policies
from ._solve import OPTIMAL_GAP as OPTIMAL_GAP
from ._solve import smallest as smallest
from ._solve import solve as solve
from ._tables import base_seconds as base_seconds
from ._windows import WINDOW as WINDOW
