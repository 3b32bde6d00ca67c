"""What ``nemo-geomask doctor`` sees of NeMo-RL's worker classes, batch keys and new fields of its loss."""

from __future__ import annotations

import shutil

import pytest

from nemo_geomask.cli import main
from nemo_geomask.hosts.nemo_rl.source_layout import compare_layout
from nemo_geomask.recipe import nemo_rl_root
from tests.helpers.nemo_rl import fake_tree

WORKERS = "nemo_rl.models.policy.workers"
MEGATRON = f"{WORKERS}.megatron_policy_worker.MegatronPolicyWorker"
LOSS = "algorithms/loss/loss_functions.py"
LOSS_NAME = "loss.loss_functions.ClippedPGLossFn"
POLICY = "models/policy/lm_policy.py"


@pytest.fixture(params=["fake", "real"])
def package(request, tmp_path):
    """A NeMo-RL that may be edited: one of a few lines, or a copy of the checkout at NEMO_RL_ROOT."""
    if request.param == "fake":
        return fake_tree.write(tmp_path) / "nemo_rl"
    if nemo_rl_root() is None:
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    for part in ("algorithms", "distributed", "models/policy", "modelopt", "data_plane"):
        if (nemo_rl_root() / "nemo_rl" / part).is_dir():
            shutil.copytree(nemo_rl_root() / "nemo_rl" / part, tmp_path / "nemo_rl" / part)
    return tmp_path / "nemo_rl"


def differences(package):
    return {state.api: state.difference for state in compare_layout(package) if state.difference}


def new(package):
    return [state.api for state in compare_layout(package) if state.is_new]


def replace(package, old, new, *paths):
    for path in paths or [path.relative_to(package) for path in package.rglob("*.py")]:
        file = package / path
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def move(package, old, new):
    (package / new).parent.mkdir(parents=True, exist_ok=True)
    (package / old).rename(package / new)


def test_a_tested_nemo_rl_differs_in_nothing(package):
    assert differences(package) == {}
    assert new(package) == []


def test_a_worker_in_another_module_of_the_same_package_is_new(package):
    move(package, "models/policy/workers/megatron_policy_worker.py", "models/policy/workers/mcore.py")
    replace(package, f"{WORKERS}.megatron_policy_worker", f"{WORKERS}.mcore")
    assert differences(package) == {
        f"worker {MEGATRON}": f"is not defined there; a class of that name is in {WORKERS}.mcore"
    }
    assert new(package) == [f"worker {WORKERS}.mcore.MegatronPolicyWorker"]


def test_a_worker_that_would_not_be_prepared_is_a_problem(package):
    """The plugin recognises policy workers by ``.policy.`` in their names."""
    move(package, "models/policy/workers/megatron_policy_worker.py", "models/training/megatron_worker.py")
    replace(package, f"{WORKERS}.megatron_policy_worker", "nemo_rl.models.training.megatron_worker")
    place = "nemo_rl.models.training.megatron_worker"
    assert differences(package) == {
        f"worker {MEGATRON}": f"is not defined there; a class of that name is in {place}",
        f"worker {place}.MegatronPolicyWorker": "nemo_rl.models.policy.lm_policy names it, but nemo_geomask takes it "
        "for a worker that gets no loss, and leaves it as it is",
    }


def test_a_worker_that_the_policy_no_longer_starts_or_that_is_gone(package):
    replace(package, f'"{MEGATRON}"', "worker_of(config)", POLICY)
    assert differences(package) == {f"worker {MEGATRON}": "nemo_rl.models.policy.lm_policy does not name it"}
    (package / "models/policy/workers/megatron_policy_worker.py").unlink()
    assert differences(package)[f"worker {MEGATRON}"] == "is not defined there"


@pytest.mark.parametrize("key", ["prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "token_mask"])
def test_a_renamed_key_is_named_with_the_one_that_replaced_it(package, key):
    replace(package, f'"{key}"', f'"{key}_v2"')
    found = differences(package)
    message = f"'{key}' is not mentioned; the most similar key is '{key}_v2'"
    for place in ("algorithms.loss.loss_functions.ClippedPGLossFn", "algorithms.grpo"):
        assert found[f"keys of a batch in nemo_rl.{place}"] == message


def test_a_key_or_a_module_that_is_gone_is_named_where_it_was(package):
    replace(package, '"generation_logprobs"', '"sampler_logprobs"', LOSS)  # the trainers' logs still have it
    replace(package, '"curr_logprobs_unfiltered"', '"curr_logprobs_raw"', "algorithms/loss/utils.py")
    (package / "algorithms/grpo.py").unlink()
    loss, utils, grpo = (f"keys of a batch in nemo_rl.algorithms.{name}" for name in (LOSS_NAME, "loss.utils", "grpo"))
    found = differences(package)
    assert found.keys() == {loss, utils, grpo}
    assert found[loss].startswith("'generation_logprobs' is not mentioned")
    assert found[utils].startswith("'curr_logprobs_unfiltered' is not mentioned")
    assert found[grpo] == "there is no such module"


def test_the_doctor_reports_them(host, tmp_path, capsys):
    host()
    package = tmp_path / "nemo_rl"
    replace(package, '"prev_logprobs"', '"old_logprobs"', LOSS)
    replace(package, "    token_level_loss: bool", "    focal: float = 0.0\n    token_level_loss: bool", LOSS)
    (package / "models/policy/workers/megatron_policy_worker.py").unlink()
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"wrong   worker {MEGATRON}: is not defined there\n" in printed
    assert "new     loss_fn.focal, which only NeMo-RL's own loss reads; its default is 0.0\n" in printed
    assert f"problem 1: NeMo-RL 9.8.7: worker {MEGATRON}: is not defined there\n" in printed
    assert "problem 2: NeMo-RL 9.8.7: keys of a batch in nemo_rl.algorithms.loss.loss_functions.Clipped" in printed
    assert "'prev_logprobs' is not mentioned; the most similar key is 'old_logprobs'\n" in printed
    assert "--accept" not in printed
    assert "problem 3" not in printed


def test_a_list_of_workers_that_moved_is_a_problem(host, tmp_path, capsys):
    host()
    (tmp_path / "nemo_rl" / "distributed" / "ray_actor_environment_registry.py").unlink()
    assert main(["doctor"]) == 1
    message = "problem 1: workers that receive the loss: NeMo-RL's list of them can't be imported: No module named"
    assert f"{message} 'nemo_rl.distributed.ray_actor_environment_registry'\n" in capsys.readouterr().out
