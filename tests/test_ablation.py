"""The benchmark that takes rules out of the search finds them all."""

import pytest

from benchmarks.ablation import ABLATIONS, varied


@pytest.mark.parametrize("name", ABLATIONS)
def test_what_is_taken_out_is_there(name):
    with varied(name):
        pass
