"""The sums over Ray Data equal those of one machine. CI has no Ray, which NeMo-RL's environment has."""

import json

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray", reason="needs Ray, as in NeMo-RL's environment: pip install 'nemo-geomask[ray]'")

import ray

from nemo_geomask.cli import main
from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.measure.ray_survey import connect_ray
from nemo_geomask.tools.diagnose.measure.run_survey import survey_run
from nemo_geomask.tools.diagnose.planted_logs import RunShape
from nemo_geomask.tools.diagnose.read.record_sources import find_runs
from tests.evidence.diagnose.planted_causes import planted_step
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
def ray_mapper():
    yield connect_ray("local")
    ray.shutdown()


def assert_same(local, remote):
    assert (list(local.steps), local.width) == (list(remote.steps), remote.width)
    for step, sums in local.steps.items():
        for name in ("sums", "bootstrap"):
            assert getattr(sums, name).tobytes() == getattr(remote.steps[step], name).tobytes()
        np.testing.assert_equal(sums.groups, remote.steps[step].groups)
    for first, window in local.windows.items():
        for name, cells in window.bin_sums.items():
            np.testing.assert_array_equal(cells, remote.windows[first].bin_sums[name])
    assert (local.worst_tokens, local.worst_sequences) == (remote.worst_tokens, remote.worst_sequences)


def test_a_cluster_computes_the_statistics_of_one_machine(logs, ray_mapper):
    (run,) = find_runs([logs])
    dimension_pairs = [("turn", "advantage")]
    local = survey_run(run, dimension_pairs=dimension_pairs)  # which converts them
    (run,) = find_runs([logs])
    assert_same(survey_run(run, dimension_pairs=dimension_pairs, mapper=ray_mapper), local)
    assert_same(
        survey_run(run, steps=[2, 5], dimension_pairs=dimension_pairs, mapper=ray_mapper),
        survey_run(run, [2, 5], dimension_pairs=dimension_pairs),
    )


def test_an_error_on_a_node_is_raised_as_the_packages_error(tmp_path, ray_mapper):
    (tmp_path / "train_data_step1.jsonl").write_text("{}\n")
    (run,) = find_runs([tmp_path])
    with pytest.raises(DataError, match="train_data_step1.jsonl:1: has no input_lengths"):
        survey_run(run, mapper=ray_mapper)
    (tmp_path / "train_data_step1.jsonl").unlink()
    with pytest.raises(DataError, match="a node of the cluster can't see this file"):
        survey_run(run, mapper=ray_mapper)


def test_the_command_prints_the_same_with_and_without_ray(logs, ray_mapper, capsys):
    outputs = []
    for more in ((), ("--ray",)):
        assert main(["diagnose", str(logs), "--json", *more]) == 1
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1]


def test_an_address_without_a_cluster_is_an_error(logs, capsys):
    ray.shutdown()
    assert main(["diagnose", str(logs), "--ray", "127.0.0.1:1"]) == 2
    assert "--ray 127.0.0.1:1: no cluster answers there" in capsys.readouterr().err
