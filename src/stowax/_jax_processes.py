"""What the processes of one job tell one another, over JAX's coordination service.

`jax.distributed.initialize` starts it. Texts are posted under a name, and waited for;
no device takes part.

Served: JAX 0.10 to 0.12.
"""

from typing import Any

import jax
from jax._src import distributed as _distributed


def processes() -> tuple[int, int]:
    """`(number of this process, how many there are)`; `(0, 1)` for a single one."""
    if _client() is None:
        return 0, 1
    return jax.process_index(), jax.process_count()


def post(name: str, text: str) -> None:
    """What `wait_for` of that name returns, in every process."""
    _client().key_value_set(name, text)


def wait_for(name: str, seconds: float) -> str | None:
    """The text that was posted under that name; `None` if none is after so long."""
    try:
        return _client().blocking_key_value_get(name, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _client() -> Any:
    return _distributed.global_state.client
