"""``nemo-geomask run`` drives NeMo-RL's own scripts, set-up and loops, over a policy that is a table.

For what takes exact counts, or a branch that a real model does not reach: which passes are made and over how many rows,
which batches reach the optimiser, what is on record. That real workers train with these losses, the rehearsals show.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from tests.helpers.nemo_rl import hosts

pytestmark = pytest.mark.slow

GSPO = [
    "++loss_fn.name=gspo",
    "loss_fn.token_level_loss=false",
    "loss_fn.use_importance_sampling_correction=true",
    "++loss_fn.is_correction_level=sequence_mean",
    "++loss_fn.truncated_importance_sampling_type=null",
    "++loss_fn.masks=[{preset:geometric,min:0.5,max:2.0}]",
]


@pytest.fixture
def recipe(tmp_path):
    """A recipe on NeMo-RL's own base recipe, with a tokenizer and prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 32)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(tmp_path / "tokenizer")
    rows = [{"input": f"w{2 + index % 30} w{2 + index % 29}", "output": "w2"} for index in range(256)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def write(base: str, section: str) -> str:
        text = f"""
defaults: {hosts.root() / "examples" / "configs" / base}
{section}:
  num_prompts_per_step: 4
  num_generations_per_prompt: 4
  max_num_steps: 2
  val_period: 0
policy:
  model_name: fake
  tokenizer: {{name: {tmp_path / "tokenizer"}, chat_template: default}}
  train_global_batch_size: 8
  train_micro_batch_size: 4
  max_total_sequence_length: 16
  generation: {{max_new_tokens: 6}}
  sequence_packing: {{enabled: false}}
data:
  shuffle: false
  num_workers: 0
  train: {{dataset_name: ResponseDataset, data_path: {tmp_path / "prompts.jsonl"}, split_validation_size: 0}}
  validation: null
  default: {{prompt_file: null, env_name: fake, dataset_name: ResponseDataset, input_key: input, output_key: output}}
env: {{fake: {{}}}}
logger: {{log_dir: {tmp_path / "logs"}, monitor_gpus: false}}
checkpointing: {{enabled: false}}
cluster: {{gpus_per_node: 1, num_nodes: 1}}
"""
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def run(tmp_path, script, config, *overrides, modules="nemo_rl.algorithms.grpo", data_plane=False):
    return subprocess.run(
        [
            *(sys.executable, str(hosts.HERE / "on_cpu.py")),
            *(str(hosts.root() / "examples" / script), "--config", config, *overrides),
        ],
        env=hosts.environment(HOST_OUT=str(tmp_path), HOST_MODULES=modules, HOST_DATA_PLANE="1" if data_plane else ""),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )


ASYNC = [
    "grpo.async_grpo.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
]
DATA_PLANE = ["data_plane.enabled=true", "data_plane.storage_capacity=64"]
# Two prompt groups at a time, so that a step comes in parts.
STREAMED = [
    *("cluster.gpus_per_node=2", "policy.train_global_batch_size=16", "data_plane.storage_capacity=64"),
    *("async_rl.min_groups_for_streaming_train=2", "async_rl.max_buffered_rollouts=8"),
    "async_rl.max_inflight_prompts=2",
]
SINGLE_CONTROLLER = "nemo_rl.algorithms.single_controller_utils.setup"


def train(trainer, recipe, tmp_path, *overrides):
    """One of NeMo-RL's loops over GRPO's recipe."""
    hosts.require("nemo_rl.algorithms.grpo")
    if trainer == "single controller":
        hosts.require(SINGLE_CONTROLLER)
        hosts.require("transfer_queue")
        config = recipe("grpo_math_1B_megatron_single_controller.yaml", "grpo")
        script = "run_grpo_single_controller.py"
        return run(tmp_path, script, config, *STREAMED, *overrides, modules=SINGLE_CONTROLLER, data_plane=True)
    more = []
    if trainer == "data plane":
        hosts.require("nemo_rl.algorithms.grpo_sync")
        hosts.require("transfer_queue")
        more = DATA_PLANE
    elif trainer == "async":
        more = ASYNC
    config = recipe("grpo_math_1B.yaml", "grpo")
    return run(tmp_path, "run_grpo.py", config, *more, *overrides, data_plane=trainer == "data plane")


TRAINERS = ["sync", "async", "data plane", "single controller"]


# The second one under loss_fn.record.
OUR_LOSSES = ("nemo_geomask.losses.policy_loss.PolicyLoss", "nemo_geomask.hosts.nemo_rl.current_logprobs.KeepingLoss")


def check(done, tmp_path, *, steps=2):
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    trained = hosts.lines(tmp_path / "train.jsonl")
    assert len(trained) >= steps
    for step in trained:
        assert step["loss_class"] in OUR_LOSSES
        assert step["own_enum"]
        assert step["grad_norm"] > 0
        assert {"geomask/mask/geometric/removed", "geomask/mismatch_k3", "probs_ratio"} <= set(step["metrics"])
    logged = [line["metrics"] for line in hosts.lines(tmp_path / "logged.jsonl") if line["prefix"] == "train"]
    # NeMo-RL logs in parts; the loss's own metrics come together.
    assert any(metrics.get("geomask/mismatch_abs", 0) > 0 for metrics in logged)
    assert "policy loss: gspo (nemo-geomask)" in done.stderr
    assert done.stderr.count("policy loss:") == 1


@pytest.mark.parametrize("trainer", TRAINERS)
def test_batches_below_the_veto_are_trained_on_and_recorded(recipe, tmp_path, trainer):
    check(train(trainer, recipe, tmp_path, *GSPO, recorded(tmp_path), "++loss_fn.batch_veto={max:10.0}"), tmp_path)
    assert logged(tmp_path, "geomask/batch_vetoed") == [0.0, 0.0]
    ages = records(tmp_path)
    assert ages[1] == {0}
    assert ages[2] == {0} if trainer in ("sync", "data plane") else ages[2] <= {0, 1}


def recorded(tmp_path):
    return f"++loss_fn.record={{dir:{tmp_path / 'records'}}}"


def records(tmp_path):
    """Ages of the sequences of each step on record, which is whole."""
    parquet = pytest.importorskip("pyarrow.parquet")
    ages = {}
    for step in (1, 2):
        table = parquet.read_table(tmp_path / "records" / f"step-{step:07d}-driver.parquet")
        assert table.num_rows == 16
        assert sorted(table["group"].to_pylist()) == [group for group in range(4) for _ in range(4)]
        for name in ("reward", "gen", "prev", "advantages", "weight_version"):
            assert table[name].null_count == 0, name
        for gen, mask in zip(table["gen"].to_pylist(), table["mask"].to_pylist(), strict=True):
            assert all((logprob < 0) == trains for logprob, trains in zip(gen, mask, strict=True))
        ages[step] = set(table["staleness"].to_pylist())
    return ages


def logged(tmp_path, name):
    lines = hosts.lines(tmp_path / "logged.jsonl")
    return [line["metrics"][name] for line in lines if line["prefix"] == "train" and name in line["metrics"]]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_vetoed_batches_are_not_trained_on(recipe, tmp_path, trainer):
    veto = "++loss_fn.batch_veto={max:1e-9,max_in_a_row:2}"
    done = train(trainer, recipe, tmp_path, *GSPO, veto)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert not (tmp_path / "train.jsonl").exists()
    assert logged(tmp_path, "geomask/batch_vetoed") == [1.0, 1.0]
    assert all(kl > 1e-9 for kl in logged(tmp_path, "geomask/batch_kl"))
    assert logged(tmp_path, "grad_norm") == [0.0, 0.0]
    # Every metric is there, of the policy as it is, and whole where the batch came in parts.
    assert logged(tmp_path, "probs_ratio") == [pytest.approx(1.0)] * 2
    assert logged(tmp_path, "geomask/mismatch_k3") == [pytest.approx(kl) for kl in logged(tmp_path, "geomask/batch_kl")]
    assert done.stderr.count("no update on this batch: mismatch KL") == 2
    if trainer == "single controller":
        assert len(hosts.lines(tmp_path / "aborted.jsonl")) == 2


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_forward_pass_for_what_nothing_reads(recipe, tmp_path, trainer):
    anchored = [word for word in GSPO if "is_correction_level" not in word and "masks" not in word]
    anchored += ["++loss_fn.ratio_anchor=gen", "++loss_fn.masks=[{preset:opsm,delta:0.5}]"]
    # GSPO's own bounds leave no room for a mismatch as large as it is here.
    anchored += ["loss_fn.ratio_clip_min=0.5", "loss_fn.ratio_clip_max=0.5"]
    done = train(trainer, recipe, tmp_path, *anchored)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    trained = hosts.lines(tmp_path / "train.jsonl")
    assert len(trained) >= 2
    assert all(step["grad_norm"] > 0 for step in trained)
    assert not (tmp_path / "scored.jsonl").exists()
    for name in ("gen_kl_error", "token_mult_prob_error", "geomask/total_k3", "probs_ratio"):
        assert all(value > 0 for value in logged(tmp_path, name))
        assert len(logged(tmp_path, name)) == 2
    assert not logged(tmp_path, "geomask/mismatch_k3")
    # What NeMo-RL makes of them itself is not known either, and not 0.
    assert all(math.isnan(value) for value in logged(tmp_path, "mean_seq_mult_prob_error"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_sample_is_audited(recipe, tmp_path, trainer):
    anchored = ["++loss_fn.name=clipped_pg", "++loss_fn.ratio_anchor=gen", "++loss_fn.audit_fraction=0.25"]
    corrected = ["loss_fn.use_importance_sampling_correction=true", "policy.logprob_batch_size=1"]
    done = train(trainer, recipe, tmp_path, *anchored, *corrected)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    scored = sum(line["rows"] for line in hosts.lines(tmp_path / "scored.jsonl"))
    assert scored == 8  # a quarter of two batches of 16
    # Six tokens a response.
    assert logged(tmp_path, "geomask/audit/tokens") == [24.0, 24.0]
    assert all(value > 0 for value in logged(tmp_path, "geomask/audit/mismatch_k3_sum"))
    assert not logged(tmp_path, "geomask/mismatch_k3")


def ppo(recipe, tmp_path, *overrides, loss=GSPO):
    hosts.require("nemo_rl.algorithms.ppo")
    rest = ["ppo.val_at_start=false", "ppo.ppo_epochs=2", "ppo.reward_shaping.enabled=false"]
    config = recipe("ppo_math_1B.yaml", "ppo")
    return run(tmp_path, "run_ppo.py", config, *loss, *rest, *overrides, modules="nemo_rl.algorithms.ppo")


def test_ppos_epochs_train_and_are_recorded(recipe, tmp_path):
    check(ppo(recipe, tmp_path, recorded(tmp_path)), tmp_path, steps=4)
    assert records(tmp_path) == {1: {0}, 2: {0}}  # two epochs on each


def test_ppos_epochs_are_vetoed_once(recipe, tmp_path):
    done = ppo(recipe, tmp_path, "++loss_fn.batch_veto={max:1e-9,max_in_a_row:2}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert not (tmp_path / "train.jsonl").exists()
    # Two batches, each for two epochs.
    assert done.stderr.count("no update on this batch: mismatch KL") == 4
