"""The same sums over Ray Data. CI has no Ray, which NeMo-RL brings along."""

import json

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray", reason="needs Ray, as in NeMo-RL's environment: pip install 'nemo-geomask[ray]'")

import ray

from nemo_geomask.cli import main
from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.planted_logs import RunShape, planted_step
from nemo_geomask.tools.diagnose.ray_survey import connect_ray
from nemo_geomask.tools.diagnose.record_sources import find_runs
from nemo_geomask.tools.diagnose.run_survey import survey_run
from tests.helpers.logs import log_rows, write_log

pytestmark = pytest.mark.slow
SHAPE = RunShape(prompts=4, samples=3, length=40)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for step in range(1, 6):
        write_log(
            directory, step, list(log_rows(planted_step(0, step, "precision" if step > 3 else None, 9.0, shape=SHAPE)))
        )
    return directory


@pytest.fixture(scope="module")
def over():
    yield connect_ray("local")
    ray.shutdown()


def assert_same(mine, others):
    assert (list(mine.steps), mine.width) == (list(others.steps), others.width)
    for step, sums in mine.steps.items():
        for name in ("sums", "boot"):
            assert getattr(sums, name).tobytes() == getattr(others.steps[step], name).tobytes()
        assert sums.groups == others.steps[step].groups
    for first, window in mine.windows.items():
        for name, cells in window.bin_sums.items():
            np.testing.assert_array_equal(cells, others.windows[first].bin_sums[name])
    assert (mine.worst_tokens, mine.worst_sequences) == (others.worst_tokens, others.worst_sequences)


def test_a_cluster_finds_what_one_machine_finds(logs, over):
    (run,) = find_runs([logs])
    dimension_pairs = [("turn", "advantage")]
    here = survey_run(run, dimension_pairs=dimension_pairs)  # which converts them
    (run,) = find_runs([logs])
    assert_same(survey_run(run, dimension_pairs=dimension_pairs, mapper=over), here)
    assert_same(
        survey_run(run, steps=[2, 5], dimension_pairs=dimension_pairs, mapper=over),
        survey_run(run, [2, 5], dimension_pairs=dimension_pairs),
    )


def test_an_error_on_a_node_is_that_of_the_package(tmp_path, over):
    (tmp_path / "train_data_step1.jsonl").write_text("{}\n")
    (run,) = find_runs([tmp_path])
    with pytest.raises(DataError, match="train_data_step1.jsonl:1: has no input_lengths"):
        survey_run(run, mapper=over)
    (tmp_path / "train_data_step1.jsonl").unlink()
    with pytest.raises(DataError, match="a node of the cluster can't see this file"):
        survey_run(run, mapper=over)


def test_the_command_says_the_same(logs, over, capsys):
    told = []
    for more in ((), ("--ray",)):
        assert main(["diagnose", str(logs), "--json", *more]) == 1
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]


def test_no_cluster_is_an_error(logs, capsys):
    ray.shutdown()
    assert main(["diagnose", str(logs), "--ray", "127.0.0.1:1"]) == 2
    assert "--ray 127.0.0.1:1: no cluster answers there" in capsys.readouterr().err
