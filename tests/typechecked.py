"""Checks every call in stowax against its annotations: `pytest -p typechecked`.

Not on by default, since tests of bad input want stowax's own messages.
"""

from beartype import BeartypeConf, BeartypeDecorPlace
from beartype.claw import beartype_package

beartype_package(
    "stowax",
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a float
        is_random=False,  # hypothesis does not like others to draw
        claw_decor_place_func=BeartypeDecorPlace.FIRST,  # below jax.custom_vjp
    ),
)
