"""In whose memory a loop over blocks writes what it gives to the device."""

from collections.abc import Mapping, Sequence

from .._jaxprs._jaxpr import Program


def places_of(
    program: Program,
    users: Mapping[int, Sequence[int]],
    on_device: Mapping[int, int],
    loop: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> list[tuple[int, int | None]]:
    """For each given array the one in whose memory it is written.

    Results of the step take inputs of the step, in the order in which `jax.jit`
    pairs donated arguments with results; others take what nobody needs afterwards.
    """
    gives, sliced, nodes = loop
    count, mine = program.input_count, set(nodes)
    donated = sorted(i for i in sliced if i < count)
    spent = [i for i in sliced if i >= count and mine.issuperset(users[i])]
    spent = [i for i in spent if i in program.maker and i not in on_device]
    places = []
    last = len(program.outputs)
    for number in sorted(gives, key=lambda n: on_device.get(n, last)):
        pool = donated if number in on_device else spent
        kind = program.avals[number].dtype
        fit = [i for i in pool if program.avals[i].dtype == kind]
        places.append((number, fit[0] if fit else None))
        if fit:
            pool.remove(fit[0])
    return places
