"""Whose line an instruction has: the user's, a library's, never that of our caller."""

import sysconfig
import types

import pytest

from stowax._hlo._reader import Reader
from stowax._where import OWN_FOLDER

LIBRARY = sysconfig.get_paths()["purelib"]
USER = "/home/me/train.py"


def line(*files):
    """What is said of an instruction with these frames, the innermost first."""
    index = types.SimpleNamespace(
        file_names=[*files],
        file_locations=[
            types.SimpleNamespace(file_name_id=k + 1, line=k + 1)
            for k in range(len(files))
        ],
        stack_frames=[
            types.SimpleNamespace(
                file_location_id=k + 1,
                parent_frame_id=k + 2 if k + 1 < len(files) else 0,
            )
            for k in range(len(files))
        ],
    )
    reader = types.SimpleNamespace(
        module=types.SimpleNamespace(stack_frame_index=index)
    )
    return Reader.source.__wrapped__(reader, 1)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([f"{LIBRARY}/flax/linear.py", USER], f"{USER}:2"),
        ([f"{OWN_FOLDER}_layers/_stack.py", USER], f"{USER}:2"),
        ([f"{LIBRARY}/flax/linear.py", f"{LIBRARY}/click/core.py"], "flax/linear.py:1"),
        # A loop that a plan wrote, from the command line: not Click's line.
        ([f"{OWN_FOLDER}_layers/_stack.py", f"{LIBRARY}/click/core.py"], ""),
    ],
)
def test_a_line_that_only_called_us_says_nothing(files, expected):
    assert line(*files).removeprefix(f"{LIBRARY}/") == expected
