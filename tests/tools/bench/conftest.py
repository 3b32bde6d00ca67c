"""Tests of what the benchmarks count and say run without the pass over memory that precedes each timed run."""

import pytest

from nemo_geomask.tools.bench import timing
from nemo_geomask.tools.bench.peers import close_group


@pytest.fixture(autouse=True)
def fast_clock(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 1)
    yield
    close_group()
