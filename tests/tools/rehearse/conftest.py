"""The fixture by which tests start real rehearsals."""

from __future__ import annotations

import pytest

from tests.tools.rehearse.real_runs import Started


@pytest.fixture
def rehearsal(tmp_path):
    started = []

    def start(*arguments, environment=None):
        started.append(Started(tmp_path, *arguments, environment=environment))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()  # its processes end with it
        each.process.wait(60)
        each.output.close()
