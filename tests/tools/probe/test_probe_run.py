"""A probe from recipe values to report, on made-up log-probs."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from nemo_geomask.cli.probe import check_supported
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.probe.free_checks import FreeCheck
from nemo_geomask.tools.probe.probe_report import as_json, as_text, recipe_lines, sentence
from nemo_geomask.tools.probe.probe_run import choose_switches, probe
from nemo_geomask.tools.probe.resolved_settings import flatten, trainer_settings, watch_forward
from nemo_geomask.tools.shared.json_output import to_json
from nemo_geomask.tools.shared.mismatch_switches import mismatch_switches
from tests.tools.probe.synthetic_stack import SyntheticStack

PRECISION = "policy.generation.vllm_cfg.precision"
VALUES = {PRECISION: "bfloat16", "policy.precision": "float32", "policy.generation.temperature": 1.0}


def choose(values=VALUES, names=None, trainer="dtensor", has_gpus=False, is_read=lambda key: True, replaced=None):
    switches, rows = choose_switches(
        values, replaced or {}, names=names, is_read=is_read, trainer=trainer, has_gpus=has_gpus
    )
    return [switch.id for switch in switches], {row.switch.id: row for row in rows}


ASYNC, REPLAY = "policy.generation.vllm_cfg.async_engine", "policy.router_replay.enabled"
MEGATRON = "policy.megatron_cfg.enabled"
ENGINE_TP, ENGINE_EP = (f"policy.generation.vllm_cfg.{axis}_parallel_size" for axis in ("tensor", "expert"))


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({ASYNC: True}, [f"++{ASYNC}=false", "++grpo.async_grpo.enabled=false"]),
        ({REPLAY: True, MEGATRON: True}, [f"++{REPLAY}=false"]),
        (
            {ASYNC: True, REPLAY: True, MEGATRON: True},
            [f"++{ASYNC}=false", "++grpo.async_grpo.enabled=false", f"++{REPLAY}=false"],
        ),
        ({ENGINE_EP: 8, ENGINE_TP: 4}, [f"++{ENGINE_EP}=1"]),
        ({ENGINE_EP: 4, ENGINE_TP: 4}, []),
        # DTensor's workers don't read the key.
        ({REPLAY: True}, []),
        ({REPLAY: True, MEGATRON: False, ASYNC: False}, []),
        ({}, []),
    ],
)
def test_what_can_not_be_scored_is_named_with_all_overrides(values, overrides):
    if not overrides:
        check_supported(values)
        return
    with pytest.raises(ConfigError) as caught:
        check_supported(values)
    assert str(caught.value).partition("give ")[2].split() == overrides
    named = {key: "8" if key == ENGINE_EP else "true" for key in values if key not in (MEGATRON, ENGINE_TP)}
    assert all(f"{key} is {value}, and " in str(caught.value) for key, value in named.items())


@pytest.mark.parametrize("size", ["x", None, [1], {"a": 1}, True, 1.5])
def test_a_size_that_is_no_number_is_an_error(size):
    with pytest.raises(ConfigError, match=f"^{ENGINE_EP} must be a whole number"):
        check_supported({ENGINE_EP: size, ENGINE_TP: 1})


def test_only_what_the_recipe_leaves_open_is_tried():
    chosen, rows = choose()
    assert "engine_precision" in chosen
    assert "trainer_precision" not in chosen  # float32 already
    assert "rope_override" not in chosen  # there is nothing to take away
    assert "router_dtype" not in chosen  # Megatron's
    assert rows["moe_backend"].verdict == "not testable here"
    assert "moe_backend" in choose(has_gpus=True)[0]
    assert "router_dtype" in choose(trainer="megatron")[0]


def test_a_key_that_is_absent_is_tried_unless_its_default_is_the_conservative_value():
    assert "prefix_caching" in choose()[0]
    chosen, rows = choose(trainer="megatron", is_read=lambda key: False)
    assert not {"megatron_cp", "fused_logprobs"} & {*chosen, *rows}
    assert "megatron_cp" in choose({"policy.megatron_cfg.context_parallel_size": 2}, trainer="megatron")[0]


def test_a_layout_that_was_made_smaller_names_the_option_for_more_processes():
    key = "policy.megatron_cfg.tensor_model_parallel_size"
    chosen, rows = choose({key: 1}, replaced={key: 4}, trainer="megatron")
    assert "megatron_tp" not in chosen
    assert rows["megatron_tp"].note == "the recipe's value, 4, needs more processes; --ranks allows them"
    # The engine of a rehearsal on CPUs has one process.
    _, rows = choose({ENGINE_TP: 1}, replaced={ENGINE_TP: 4})
    assert rows["engine_tp"].note == "the probe has the conservative value here, and not the recipe's 4"


def test_a_key_that_this_nemo_rl_does_not_read_is_not_tried():
    chosen, rows = choose(is_read=lambda key: not key.endswith("logprobs_mode"))
    assert "logprobs_mode" not in chosen
    assert "main is the first that does" in rows["logprobs_mode"].note


def test_a_value_that_was_replaced_by_the_conservative_one_is_not_taken_for_the_recipes():
    key = "policy.generation.vllm_cfg.enforce_eager"
    chosen, rows = choose({key: True}, replaced={key: False}, has_gpus=True)
    assert "enforce_eager" not in chosen
    assert (rows["enforce_eager"].verdict, rows["enforce_eager"].was) == ("not testable here", False)
    assert "the probe has the conservative value here, and not the recipe's False" in rows["enforce_eager"].note
    assert "enforce_eager" not in choose({key: True})[1]
    # The other way round, nothing is in the way: a small batch replaces the recipe's, and 1 is tried in its place.
    assert (
        "logprob_batch_size" in choose({"policy.logprob_batch_size": 2}, replaced={"policy.logprob_batch_size": 4})[0]
    )


def test_switches_are_named_by_id_or_group():
    assert choose(names=["engine_precision"])[0] == ["engine_precision"]
    assert set(choose(names=["engine scheduling"])[0]) == {"prefix_caching", "chunked_prefill", "async_scheduling"}
    with pytest.raises(ConfigError, match="there is no switch or group 'precison'"):
        choose(names=["precison"])


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    made = SyntheticStack({PRECISION: ("engine", 0.2)}, {PRECISION: "float32"})
    switches, others = choose_switches(
        *(VALUES, {}),
        names=["engine_precision", "moe_backend"],
        is_read=lambda key: True,
        trainer="dtensor",
        has_gpus=False,
    )
    return probe(
        *("recipe.yaml", [], made, switches, others, VALUES), folder=folder, prompts=24, generations=2, budget=1e9
    )


def test_the_report_names_the_cause_the_line_to_set_and_what_was_not_tried(result):
    assert "dtype of the engine's weights and activations" in sentence(result)
    assert recipe_lines(result) == [f"++{PRECISION}=float32  # about half of bfloat16's speed, twice its memory"]
    text = "\n".join(as_text(result))
    assert "explains, confirmed" in text
    assert "moe_backend: changes kernels of GPUs alone" in text
    assert "engine_precision: set back among all conservative values, 100.0% of the mismatch returns" in text


def test_what_else_was_changed_and_what_was_not_probed_is_in_the_report(result):
    row = dataclasses.replace(result.ledger.rows[0], also={"policy.chunks": None}, was=8, ran=2)
    shown = dataclasses.replace(
        result,
        ledger=dataclasses.replace(result.ledger, rows=(row,)),
        unprobed=("policy.generation.quant_cfg: a kernel",),
    )
    text = "\n".join(as_text(shown))
    assert "engine_precision: together with policy.chunks: null" in text
    assert "engine_precision: the probe ran with 2 in place of the recipe" in text
    assert "policy.generation.quant_cfg: a kernel" in text


def test_only_what_other_prompts_do_not_deny_is_an_answer(result):
    assert result.is_answered
    (row,) = result.ledger.culprits
    denied = dataclasses.replace(result.ledger, rows=(dataclasses.replace(row, is_confirmed=False),))
    assert not dataclasses.replace(result, ledger=denied).is_answered
    assert "which other prompts do not confirm" in sentence(dataclasses.replace(result, ledger=denied))
    unlooked = dataclasses.replace(result.ledger, rows=(dataclasses.replace(row, is_confirmed=None),))
    assert dataclasses.replace(result, ledger=unlooked).is_answered
    noise = dataclasses.replace(result, ledger=dataclasses.replace(result.ledger, floor=1.0))
    assert not noise.is_answered
    assert recipe_lines(noise) == []
    assert sentence(noise).endswith("noise makes up to 1; see the gaps of each side with its repetitions.")
    small = dataclasses.replace(result.ledger.baseline, k3=1e-8)
    assert dataclasses.replace(result, ledger=dataclasses.replace(result.ledger, baseline=small, rows=())).is_answered


def test_layouts_are_not_tried_with_adapters():
    values = {"policy.megatron_cfg.tensor_model_parallel_size": 2, "policy.megatron_cfg.peft.enabled": True}
    chosen, rows = choose(values, trainer="megatron")
    assert "megatron_tp" not in chosen
    assert "adapters of another layout get other values" in rows["megatron_tp"].note


def test_a_value_that_is_as_good_as_the_conservative_one_is_left_alone():
    key = "policy.megatron_cfg.moe_router_dtype"
    for value, is_tried in (("fp64", False), ("fp32", False), ("bf16", True)):
        assert ("router_dtype" in choose({key: value}, trainer="megatron")[0]) == is_tried


def test_a_value_that_is_merged_is_taken_out_and_a_fault_leaves_nothing_to_set(result):
    row = result.ledger.culprits[0]
    override = next(each for each in mismatch_switches() if each.id == "rope_override")
    ledger = dataclasses.replace(result.ledger, rows=(dataclasses.replace(row, switch=override),))
    assert recipe_lines(dataclasses.replace(result, ledger=ledger)) == [f"~{override.key}"]
    row = dataclasses.replace(result.ledger.rows[0], also={"policy.chunks": None, "policy.flag": False})
    ledger = dataclasses.replace(result.ledger, rows=(row,))
    (line,) = recipe_lines(dataclasses.replace(result, ledger=ledger))
    assert line.startswith(f"++{PRECISION}=float32 ++policy.chunks=null ++policy.flag=false  # ")
    fault = FreeCheck("shift", "fault", "shifted", "look at padding")
    assert recipe_lines(dataclasses.replace(result, checks=(fault,))) == []


def test_batches_hold_the_longer_responses_where_the_recipe_limits_their_tokens(tmp_path):
    key = "policy.sequence_packing.logprob_mb_tokens"
    made = SyntheticStack({PRECISION: ("engine", 0.2)}, {PRECISION: "float32"})
    probe(
        *("recipe.yaml", [], made, [], [], {**VALUES, key: 32}), folder=tmp_path, prompts=4, generations=2, budget=0.0
    )
    longest = made.starts[0]["policy.max_total_sequence_length"]
    assert made.starts[0][key] >= longest
    assert "policy.dynamic_batching.logprob_mb_tokens" not in made.starts[0]


def test_json_has_the_ledger(result):
    content = json.loads(to_json(as_json(result)))
    row = content["ledger"]["rows"][0]
    assert (row["switch"]["id"], row["verdict"], row["was"]) == ("engine_precision", "explains", "bfloat16")
    assert row["share"] > 0.95


def test_resolved_settings_are_plain_values_of_objects():
    class Config:
        def __init__(self):
            self.dtype, self._secret, self.inner = "bf16", 1, {"a": [1, 2]}

    assert dict(flatten(Config(), "engine")) == {"engine.dtype": "bf16", "engine.inner.a": "[1, 2]"}


def test_the_trainers_forward_passes_are_counted_with_the_options_of_their_calls():
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def forward(self, input_ids, fp32_output=True, labels=None):
            logits = torch.zeros(*input_ids.shape, 3)
            return logits if fp32_output else logits.bfloat16()

    actor = SimpleNamespace(model=[Model()])
    watch_forward(actor)
    actor.model[0](input_ids=torch.zeros(1, 4, dtype=torch.long))
    actor.model[0](input_ids=torch.zeros(2, 4, dtype=torch.long), fp32_output=False, labels=torch.zeros(1))
    first, second = trainer_settings(actor)["trainer.forward"].split(", ")
    assert first == "1 tokens 1×4 logits torch.float32 weights ? training True"
    assert second == "1 tokens 2×4 logits torch.bfloat16 weights ? training True fp32_output False"
    watch_forward(actor)
    assert trainer_settings(actor)["trainer.forward"] == ""
    assert "trainer.context_parallel_size" not in trainer_settings(actor)
    actor.cp_size = 2  # of NeMo-RL's own trainer, whose model does not know it
    assert trainer_settings(actor)["trainer.context_parallel_size"] == "2"
