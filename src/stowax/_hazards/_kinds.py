"""The closed list of hazards: what each is, and what to do about it.

Worst first: wrong numbers and lost hardware, then what silently did not happen, then
time, then memory. The text is fixed, so that a name can be looked up; where and how
much are found by the searches.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of hazard: a sentence what it is, and the remedy."""

    what: str
    remedy: str


KINDS: Mapping[str, Kind] = {
    "misplaced-copy": Kind(
        "The compiler copies a slice in a loop from or to another place.",
        "Do not train with this program: its numbers are wrong. Compute the index "
        "with a number that the compiler cannot know, such as a zero made of data; it "
        "then looks where the index says. A GPU's compiler is wrong about numbers that "
        "one trip hands on to the next, jaxlib 0.10 about all that is computed.",
    ),
    "host-compute": Kind(
        "Arithmetic runs on the host's processor instead of the device.",
        "Bring the operands to the device before the arithmetic: "
        "jax.device_put(x, jax.memory.Space.Device), inside a scan over layers rather "
        "than a Python loop. On TPU the compiler option "
        "xla_disable_automatic_host_compute_offload=True turns this into an error.",
    ),
    "known-bad-version": Kind(
        "This version of XLA is known to go wrong with these options.",
        "Set the option that is named, or use another version of jaxlib; then compare "
        "loss and gradients with and without offloading before a long run.",
    ),
    "memory-kinds-dropped": Kind(
        "Arguments were to be in host memory, and the program has them on the device.",
        "Write the memory kind into the sharding of every ShapeDtypeStruct: "
        "jax.eval_shape drops it, plan.specs keeps it. Compile-only GPU devices have "
        "no memories at all: let stowax.target(name).compile(jitted, *specs) lower it.",
    ),
    "offload-vanished": Kind(
        "A copy to the host that the step asks for is not in the program.",
        "In straight-line code XLA folds a round trip away where it believes that "
        "there is room: put the layers into a jax.lax.scan (stowax's plans do so by "
        "themselves), and use what comes back, not the value that was sent.",
    ),
    "policy-name-unmatched": Kind(
        "A checkpoint policy names what no value is called.",
        "Correct the name, or give it: jax.ad_checkpoint.checkpoint_name(x, name) "
        "inside of the checkpointed function.",
    ),
    "state-moved": Kind(
        "State is returned in another memory than it came from.",
        "Name the memory of what is returned: jax.jit(step, out_shardings=...) with "
        "the shardings of the arguments, memory kinds included.",
    ),
    "host-memory-exceeded": Kind(
        "The program needs more host memory than there is.",
        "Offload less, or spread the step over more hosts. On a GPU the pinned pool "
        "has its own limit: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before JAX starts.",
    ),
    "synchronous-copy": Kind(
        "The device stands still while a copy crosses the link.",
        "Copy between memories and compute apart: jax.device_put of the whole value, "
        "or of a slice along its first axis, so that the compiler can make the copy "
        "asynchronous.",
    ),
    "unhidden-copy": Kind(
        "A copy is waited for where it starts.",
        "Start the copy an iteration early and use it an iteration late, so that a "
        "whole layer's work hides it (stowax's own plans do); or keep the array on "
        "the device.",
    ),
    "argument-not-donated": Kind(
        "State is copied into new memory although it could stay where it is.",
        "jax.jit(step, donate_argnums=...) with the positions of the state; do not use "
        "the old state after the step. What the step does not change it need not "
        "return.",
    ),
    "donated-in-vain": Kind(
        "An argument is given away and nothing takes its place.",
        "Return it with the same shape, dtype, sharding and memory, or do not donate "
        "it.",
    ),
    "stacked-again": Kind(
        "A loop returns what it was given, and that is stacked a second time.",
        "Let the body of the scan return what it makes, not the weights that it was "
        "given: after the loop they are where they were before it. In Flax NNX, leave "
        "nnx.state(layer) out of what the body returns; and around layers in nnx.remat "
        "let jax.grad differentiate, as nnx.grad returns their state: graph, weights, "
        "rest = nnx.split(model, nnx.Param, ...), then jax.grad of a function of the "
        "weights that calls nnx.merge(graph, weights, rest).",
    ),
    "kept-to-be-summed": Kind(
        "A loop keeps of every iteration what could be summed as it goes.",
        "Add it to the carry of the scan in its body. If these are gradients of "
        "microbatches, let the body compute them (jax.value_and_grad) and write "
        "jax.tree.map(jnp.add, total, gradients). Where a loss over microbatches has "
        "to be differentiated as a whole, put jax.checkpoint around the body.",
    ),
    "turned-stack": Kind(
        "The compiler transposes a whole stack between the loop that writes and that "
        "reads.",
        "Recompute the value in the backward pass: jax.checkpoint around the body of "
        "the scan, with a policy that does not save it. To keep it, write the product "
        "so that both passes want one order of axes, or fix the order of the value in "
        "the body: jax.experimental.layout.with_layout_constraint. Plans of stowax do "
        "for one GPU.",
    ),
    "rematerialization": Kind(
        "The compiler computes values again to save memory, unasked.",
        "The program is above the memory that the compiler allows itself: plan with a "
        "smaller budget, so that the cheapest values are computed again and not "
        "whichever the compiler finds; on a GPU set "
        "xla_gpu_enable_host_memory_offloading=true if host buffers are counted.",
    ),
    "duplicate-copy": Kind(
        "The same bytes cross the link more often than they need to.",
        "Fetch once and use the result; what a loop does not change is fetched before "
        "it. What stays on the device anyway need not go to the host.",
    ),
    "cheaper-to-recompute": Kind(
        "Waiting for an offloaded value takes longer than making it again.",
        "Take the value out of the offloaded ones and let jax.checkpoint recompute it "
        "(stowax.plan weighs the two).",
    ),
    "small-copy": Kind(
        "Many small copies cross the link, each at the cost of its start.",
        "Keep small arrays on the device, or store several in one array.",
    ),
    "unaligned-offload": Kind(
        "An offloaded array does not fill the tiles that the chip copies.",
        "Let the last two axes be multiples of 8 and 128 (16 and 128 in bfloat16): "
        "reshape or join axes before the copy; or do not offload the array.",
    ),
}
"""Every kind of hazard, worst first."""
