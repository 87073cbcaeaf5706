"""The arrays at the peak of a lowered step, with the roles of its arguments."""

from collections.abc import Sequence

from .. import _mlir
from .._layers._stack import LOOP_SCOPE
from .._predict._peak import predict_peak
from .._predict._predict import MemoryPrediction
from .._records._peak import MemoryPeak
from .._step._argument_roles import argument_roles
from .._target._compiled import LoweredProgram


def peak_of(
    lowered: LoweredProgram, platform: str, planned: Sequence[str] = ()
) -> tuple[MemoryPrediction, MemoryPeak]:
    """What a lowered step is predicted to need of a device, and the arrays behind it.

    **Arguments:** `platform` is the target's; `planned` are the roles that a plan has
    for the step's arguments, in their order.
    """
    graph = _mlir.read_graph(lowered.compiler_ir(), sources=True)
    roles = argument_roles(lowered.traced, planned)
    return predict_peak(graph, platform, roles, LOOP_SCOPE)
