"""Stages, failures and proof, read from the events of runs that were never made."""

from __future__ import annotations

import pytest

from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import RecipeFacts, check
from nemo_geomask.tools.rehearse.error_causes import likely_cause
from nemo_geomask.tools.rehearse.event_log import STAGES, Events, read_events, stage_of
from nemo_geomask.tools.rehearse.plan import PlanOptions, plan
from nemo_geomask.tools.rehearse.rehearsal import Rehearsal
from nemo_geomask.tools.rehearse.rehearsal_report import as_json, as_text
from nemo_geomask.tools.rehearse.run_outcome import RunResult, outcome_of
from tests.tools.rehearse.base_recipe import BASE


def begin(at, stage, label=""):
    return {"at": at, "kind": "begin", "stage": stage, "label": label}


def end(at, stage, label="", **what):
    return {"at": at, "kind": "end", "stage": stage, "label": label, **what}


# On this recipe DTensor v2 resumes with another reference policy.
RESUMED = ("policy.dtensor_cfg._v2=true", "++loss_fn.reference_policy_kl_penalty=0.01")
STARTED = [end(5.0, "start"), begin(6.0, "workers", "Policy"), end(26.0, "workers", "Policy")]
STEP = [begin(30.0, "step", "policy_training"), end(32.0, "step", "policy_training")]
LOGGED = {"at": 33.0, "kind": "metrics", "step": 1, "prefix": "train", "values": {"loss": 0.5}}


def read(*events, status=0, steps=1, ended=40.0, **how):
    return outcome_of(events, status=status, steps=steps, started=0.0, ended=ended, **how)


def state(outcome):
    return {stage.name: stage.state for stage in outcome.stages}


@pytest.mark.parametrize(
    ("label", "stage"),
    [
        ("prepare_for_generation/total", "refit"),
        ("prepare_for_generation/transfer_and_update_weights", None),
        ("generation", "sampling"),
        ("policy_training", "step"),
        ("policy_training/sharding_data", None),
        ("total_step_time", None),
        ("weight_sync", "refit"),
        ("checkpointing", "checkpoint"),
    ],
)
def test_labels_of_nemo_rl(label, stage):
    assert stage_of(label) == stage


def test_a_run_that_came_to_its_end():
    again = [begin(34.0, "step", "policy_training"), end(34.5, "step", "policy_training")]
    done = read(*STARTED, *STEP, LOGGED, *again, expected_stages=frozenset(STAGES) - {"veto"})
    assert done.failure is None
    states = state(done)
    assert (states["start"], states["workers"], states["step"]) == ("ran", "ran", "ran")
    assert (states["veto"], states["checkpoint"]) == ("not in the recipe", "not reached")
    step = next(stage for stage in done.stages if stage.name == "step")
    assert (step.seconds, step.first, step.times) == (2.5, 2.0, 2)
    assert done.metrics == {1: {"loss": 0.5}}


def test_a_stage_inside_itself_counts_once():
    nested = [begin(0, "workers", "A"), begin(1, "workers", "B"), end(3, "workers", "B"), end(10, "workers", "A")]
    workers = next(stage for stage in read(*nested).stages if stage.name == "workers")
    assert (workers.seconds, workers.times, workers.labels) == (10.0, 2, ("A", "B"))


STEPS = {1: {"loss": 0.5, "reward": 0.25}, 2: {"loss": 0.25, "reward": 0.25}}


@pytest.mark.parametrize(
    ("changes", "resumed_loss", "named"),
    [
        ((), 0.3, True),
        ((), 0.25, False),
        (("policy.dtensor_cfg._v2=false",), 0.3, False),
        (("loss_fn.reference_policy_kl_penalty=0.0",), 0.3, False),
    ],
)
def test_a_resumed_step_with_another_reference_policy_names_the_setting(tmp_path, changes, resumed_loss, named):
    """NeMo-RL's issue 2955, as ``--resume`` shows it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE, encoding="utf-8")
    facts = RecipeFacts.from_recipe(read_recipe(recipe, (*RESUMED, *changes)))
    whole = RunResult((), None, STEPS)
    last = RunResult((), None, {2: {**STEPS[2], "loss": resumed_loss}})
    planned = plan(facts, folder=tmp_path / "out", options=PlanOptions(steps=2, resume=True))
    rehearsal = Rehearsal(recipe, tmp_path, check(facts).findings, False, planned, whole, tmp_path, 1.0, resumed=last)
    text, likely = "\n".join(as_text(rehearsal)), as_json(rehearsal)["resumed"]["likely"]
    assert rehearsal.ok == (resumed_loss == 0.25)
    assert ("likely: policy.dtensor_cfg._v2: " in text) == named
    assert (likely is not None and likely["rule"] == "GM209") == named


RAY = """Traceback (most recent call last):
  File "driver.py", line 1, in main
ray.exceptions.RayTaskError(BatchVetoError): ray::Worker.train() (pid=1)
  File "loss.py", line 3, in call
nemo_geomask.errors.BatchVetoError: 5 batches in a row were vetoed
"""


def test_the_stage_that_failed_is_the_innermost():
    failed = [
        begin(30.0, "step", "policy_training"),
        begin(30.5, "veto", "PrestepPass"),
        end(31.0, "veto", "PrestepPass", failed=True),
        end(31.0, "step", "policy_training", failed=True),
        {"at": 31.0, "kind": "error", "type": "RayTaskError", "message": "…", "traceback": RAY},
    ]
    done = read(*STARTED, *failed, status=1)
    assert done.failure.stage == "veto"
    assert done.failure.traceback == RAY
    assert done.failure.error == "nemo_geomask.errors.BatchVetoError: 5 batches in a row were vetoed"
    assert done.failure.setting == "loss_fn.batch_veto"
    assert state(done)["metrics"] == "not reached"


def test_a_run_out_of_time_names_the_stage_it_was_in():
    done = read(*STARTED, begin(30.0, "sampling", "generation"), status=None, ended=600.0)
    assert done.failure.stage == "sampling"
    assert state(done)["sampling"] == "running"
    assert next(stage for stage in done.stages if stage.name == "sampling").seconds == 570.0


def test_a_mistake_that_ended_the_command_before_the_driver():
    failure = read(status=2, log="warning\nnemo-geomask: error: NeMo-RL can't be imported here\n").failure
    assert (failure.stage, failure.error) == ("start", "NeMo-RL can't be imported here")


def test_a_driver_that_died_without_a_word():
    done = read(status=-9, log="Segmentation fault\n")
    assert (done.failure.stage, done.failure.traceback) == ("start", "Segmentation fault\n")
    assert "status -9" in done.failure.error


def test_a_step_that_only_sampled_is_none():
    sampled = {**LOGGED, "step": 2, "values": {"reward": 1.0}}
    assert set(read(*STARTED, *STEP, LOGGED, sampled).metrics) == {1}


def test_a_run_that_ended_early_has_failed():
    done = read(*STARTED, *STEP, LOGGED, steps=3)
    assert "1 of 3 steps" in done.failure.error


def test_the_proof_adds_up_over_workers():
    workers = [{"calls": {"PolicyLoss(name='gspo')": 4}, "pid": pid} for pid in (1, 2)]
    earlier = {"at": 1.0, "kind": "worker_counts", "step": 1, "workers": []}
    done = read(earlier, {"at": 2.0, "kind": "worker_counts", "step": 2, "workers": workers})
    assert done.loss == {"PolicyLoss(name='gspo')": 8}
    assert [worker["pid"] for worker in done.workers] == [1, 2]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("WorkerError: x can't receive the loss 'gspo'", "PYTHONPATH"),
        ("ModuleNotFoundError: No module named 'megatron.core'", "policy.megatron_cfg.enabled"),
        ("OutOfMemoryError: 6 worker(s) were killed due to the node running low on memory", "this machine's memory"),
        ("the prompt is longer than the maximum model length of 48", "policy.generation.vllm_cfg.max_model_len"),
        ("  File \"setup.py\", line 9\nKeyError: 'max_grad_norm'", "max_grad_norm"),
    ],
)
def test_the_likely_setting(text, setting):
    found = likely_cause(text)
    assert found[0].startswith(setting)


def test_a_key_of_the_recipe_that_the_error_names_comes_first():
    error = "ValueError: model_save_format must be None, its name is wrong for global_batch_size"
    settings = {"checkpointing": {}, "checkpointing.name": "x", "checkpointing.model_save_format": "y", "model": 1}
    assert likely_cause(error, error, settings) == ("checkpointing.model_save_format", None)
    # Only by its own line: a traceback has all sorts of names.
    found = likely_cause(error, "ValueError: wrong", settings)
    assert found[0] != "checkpointing.model_save_format"


def test_a_key_in_full_comes_before_its_section():
    error = "BatchVetoError: loss_fn.batch_veto: 2 batches in a row are beyond max, and max_in_a_row is 1"
    settings = dict.fromkeys(("loss_fn", "loss_fn.batch_veto", "loss_fn.batch_veto.max_in_a_row"))
    assert likely_cause(error, error, settings) == ("loss_fn.batch_veto", None)


def test_a_value_that_the_error_quotes_leads_to_its_key():
    settings = {"policy.optimizer.name": "torch.optim.NoSuch", "policy.precision": "bfloat16", "x": "Error"}
    found = likely_cause("", "ImportError: Error loading 'torch.optim.NoSuch' in bfloat16", settings)
    assert found[0] == "policy.optimizer.name"
    assert likely_cause("", "ImportError: Error loading 'torch.optim.NoSuchThing'", settings) == (None, None)


def test_an_error_in_a_plugins_code_names_the_loss():
    settings = {"loss_fn.name": "acme.losses:MINE", "policy.precision": "bfloat16"}
    found = likely_cause(
        '  File "/x/acme/losses.py", line 3, in f\n  File "/torch.py"\nTypeError: x', "TypeError: x", settings
    )
    assert found[0] == "loss_fn.name"
    assert likely_cause('  File "/x/acme/other.py", line 3\nTypeError: x', "TypeError: x", settings) == (None, None)
    text = '  File "/x/nemo_geomask/losses/evaluate.py"\nTypeError: x'
    assert likely_cause(text, "TypeError: x", {"loss_fn.name": "gspo"}) == (None, None)


def test_the_error_of_an_engine_comes_before_the_lost_connection():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6066"
    error = {"at": 31.0, "kind": "error", "type": "RuntimeError", "message": lost, "traceback": lost}
    prefix = "\x1b[36m(VllmAsyncGenerationWorker pid=5739)\x1b[0m (EngineCore pid=5855) "
    survived = f"{prefix}ImportError: no module x\n"
    logged = f"{prefix}ERROR 11-25 23:11:56 [core.py:1351] "
    ended = [
        "EngineCore encountered a fatal error.",
        "KeyError: 'a'",
        "The above exception was the direct cause of the following exception:",
        "ValueError: max_model_len is too small",
    ]
    log = survived + "".join(f"{logged}{line}\n" for line in ended)
    settings = {"policy.generation.vllm_cfg.max_model_len": 48}
    failure = read(*STARTED, error, status=1, log=log, settings=settings).failure
    assert failure.error == (
        "ValueError: max_model_len is too small (raised in vLLM's engine process; the other processes only reported: "
        f"{lost})"
    )
    assert "max_model_len" in failure.setting
    assert failure.traceback.splitlines() == ended
    # A run that hangs because the engine has ended.
    hung = read(*STARTED, status=None, log=log).failure
    assert hung.error.startswith("ValueError: max_model_len is too small (raised in vLLM's engine process; the run")
    # Without the end of an engine, or where a process was killed first, the lost connection is all there is.
    assert read(*STARTED, error, status=1, log=survived).failure.error == lost
    assert read(*STARTED, error, status=1, log=log, killed_by_kernel=1).failure.error == lost
    bare = logged + "EngineCore failed to start.\n" + logged + "AssertionError\n"
    assert read(*STARTED, error, status=1, log=bare).failure.error.startswith("AssertionError (raised in vLLM's")


def test_a_worker_that_was_killed():
    killed = "ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    killed += "\tclass_name: DTensorPolicyWorker\n\tactor_id: 5d1\n\tpid: 15539\n\tname: lm_policy-0-0\n"
    error = {"at": 31.0, "kind": "error", "type": "ActorDiedError", "message": killed, "traceback": killed}
    failure = read(*STARTED, error, status=1).failure
    assert failure.setting == "this machine's memory"
    assert "killed from outside" in str(failure.fix)
    assert failure.error.endswith("before finishing this task. (DTensorPolicyWorker, process 15539)")
    certain = read(*STARTED, error, status=1, killed_by_kernel=2).failure
    assert "the kernel killed 2 processes" in str(certain.fix)


CHAIN = """Traceback (most recent call last):
  File "driver.py", line 1, in main
ray.exceptions.ActorDiedError: The actor died, \x1b[36mray::Worker\x1b[39m (pid=1)
AttributeError: module 'torch.optim' has no attribute 'NoSuch'

During handling of the above exception, another exception occurred:

\x1b[36mray::Worker\x1b[39m (pid=1)
  File "worker.py", line 3, in init
ImportError: Error loading 'torch.optim.NoSuch'
"""


def test_of_a_chain_the_error_that_the_worker_raised_and_no_colours():
    error = {"at": 31.0, "kind": "error", "type": "ActorDiedError", "message": "…", "traceback": CHAIN}
    failure = read(*STARTED, error, status=1).failure
    assert failure.error == "ImportError: Error loading 'torch.optim.NoSuch'"
    assert "\x1b" not in failure.traceback


@pytest.mark.parametrize("text", ["Segmentation fault", '  File "worker.py"\n    n = cfg.train_micro_batch_size'])
def test_an_error_that_is_not_known_has_no_setting(text):
    assert likely_cause(text) == (None, None)


def test_events_come_back_as_written_without_a_half_line(tmp_path):
    path = tmp_path / "events.jsonl"
    assert list(read_events(path)) == []
    Events(path)("begin", stage="step", label="x")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"at": 1')
    (event,) = read_events(path)
    assert (event["kind"], event["stage"]) == ("begin", "step")
