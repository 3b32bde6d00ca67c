"""How much memory a call takes, where the system tells."""

import pytest

from nemo_geomask.bench.meters import extra_memory


def peak_memory(step, given):
    """Of the second call, see :func:`nemo_geomask.bench.meters.extra_memory`."""
    step()
    extra = extra_memory(step, given)
    if extra is None:
        pytest.skip("the system doesn't tell the peak of the memory")
    return extra
