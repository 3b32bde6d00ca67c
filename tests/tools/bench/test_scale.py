"""``bench scale``: its formulas against values by hand, and its costs against the figures that they are from."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import Recipe, read_recipe
from nemo_geomask.tools.bench import scale, scale_costs
from nemo_geomask.tools.check import LOGPROB_METHODS, ModelShape, OutputWork

MEASURED = Path(__file__).parents[3] / "docs" / "performance"
LINEAR, LOGPROBS = (
    json.loads((MEASURED / f"{name}.json").read_text())
    for name in ("linear-nvidia-h100-80gb-hbm3-2026-11-27", "logprobs-nvidia-h100-80gb-hbm3-2026-11-26")
)
# 2 FLOP/s, so that a product's floating-point operations are twice its seconds.
COSTS = scale_costs.Costs(
    "a GPU", 1e12, 2.0, dict.fromkeys(LOGPROB_METHODS, (1e15, 2e15)), {"NeMo-RL, fused": (1e18, 4e18)}
)
RECIPE = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 16},
    "loss_fn": {"name": "gspo", "token_level_loss": False, "reference_policy_kl_penalty": 0.0},
    "cluster": {"gpus_per_node": 8, "num_nodes": 2},
    "policy": {
        "model_name": "Qwen/Qwen3-30B-A3B",
        "train_global_batch_size": 128,
        "train_micro_batch_size": 1,
        "logprob_batch_size": 1,
        "max_total_sequence_length": 8192,
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
        },
        "sequence_packing": {"enabled": True, "train_mb_tokens": 16_384, "logprob_mb_tokens": 32_768},
        "generation": {"top_p": 1.0, "top_k": None, "colocated": {"enabled": True}},
    },
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return file


def test_seconds_by_hand():
    head = OutputWork(rows=10, scored=20, hidden=3, columns=5, trained=0.5)
    # A product of a row takes 2 · 3 · 5 / 2 = 15 s, its five logits 5 s forward and 10 s backward.
    assert scale_costs.method_seconds("NeMo-RL", head, COSTS) == (10 * (45 + 15), 20 * 20)
    assert scale_costs.method_seconds("geomask", head, COSTS) == (10 * (45 + 2.5 + 7.5), 20 * 20)
    assert scale_costs.method_seconds("geomask_linear", head, COSTS) == (5 * (60 + 15), 20 * 20)
    assert scale_costs.method_seconds("NeMo-RL, fused", head, COSTS) == (10 * 15 * 5, 20 * 15)
    # DTensor v1 has logits in its forward passes, whoever trains.
    linear, ours = (
        scale_costs.method_seconds(method, head, scale_costs.H100) for method in ("geomask_linear", "geomask")
    )
    assert scale_costs.method_seconds("geomask_linear", head._replace(v1=True), scale_costs.H100) == (
        linear[0],
        ours[1],
    )


def test_step_by_hand():
    # Four microbatches through three stages of 2 s, the last of 2.5 s: 2 + 2 until it starts, then four times 2.5 s.
    assert scale.step_seconds(2.0, 0.5, stages=3, microbatches=4) == 4 + 4 * 2.5
    assert scale.model_flops(ModelShape(0, 0, layers=2, attention=3, active=100), 10, length=4) == 10 * (
        200 + 2 * 2 * 3 * 4
    )


def test_costs_of_an_h100_are_those_measured():
    def nanoseconds(result, path, unit):
        row = next(row for row in result["cases"][0]["paths"] if row["path"] == path)
        return tuple(row[key]["median"] * 1e6 / unit for key in ("forward_ms", "backward_ms"))

    costs, logits = scale_costs.H100, 8192 * 151_936 / 1e6
    assert [result["cases"][0]["title"] for result in (LINEAR, LOGPROBS)] == [
        "T=8192, H=4096, V=151936, bfloat16",
        "T=8192, V=151936, bfloat16",
    ]
    for method, path in {
        "NeMo-RL": "NeMo-RL DistributedLogprob of logits.float()",
        "NeMo-RL, in chunks": "NeMo-RL ChunkedDistributedLogprob(256)",
        "geomask": "nemo_geomask",
        "geomask_linear": "nemo_geomask",
    }.items():
        assert costs.with_logits[method] == pytest.approx(nanoseconds(LOGPROBS, path, logits), rel=1e-3), method
    fused = nanoseconds(LINEAR, "NeMo-RL fused linear (1024)", logits * 4096 / 1e3)
    assert costs.without_logits == {"NeMo-RL, fused": pytest.approx(fused, rel=1e-3)}
    assert costs.products == pytest.approx(LINEAR["cases"][0]["products_tflop_s"] * 1e12, rel=1e-3)
    assert costs.gpu == "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-27"


def test_seconds_as_measured():
    """The sums hold where they were not taken from: another shard, another fraction."""
    paths = {"geomask_linear": "nemo_geomask linear_logprobs", "NeMo-RL, fused": "NeMo-RL fused linear (1024)"}
    for result in LINEAR["cases"]:
        case = result["case"]
        if case["entropy"] or "error" in result:
            continue
        head = OutputWork(*[case["tokens"]] * 2, case["hidden"], case["vocab"] // case["tp"], trained=case["fraction"])
        rows = {row["path"]: row for row in result["paths"]}
        for method, name in {**paths, "geomask": "nemo_geomask with logits"}.items():
            expected = rows[name]["ms"]["median"] / 1e3
            # A fifth of the rows, or an eighth of the columns: launches and copies show.
            whole = case["fraction"] == 1 and case["tp"] == 1
            assert scale_costs.method_seconds(method, head, scale_costs.H100)[0] == pytest.approx(
                expected, rel=0.03 if whole else 0.2
            )


def test_a_recipe_is_scaled_to_each_number_of_gpus(path, capsys, tmp_path):
    assert main(["bench", "scale", str(path), "--out", str(tmp_path / "out"), "--gpus", "8,64,100"]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "scale-recipe.json").read_text())
    assert found["head"] == {
        "rows": 8192, "scored": 16_384, "hidden": 2048, "columns": 75_968, "chunk": None, "trained": 1.0,
        "logit_bytes": 4, "fused_gradient": False, "v1": False,
    }  # fmt: skip
    assert found["layout"] == "TP 2, CP 2, EP 4, PP 2, DP 2"
    # 128 sequences of 8192 tokens in microbatches of 16384: 64 over the replicas. 100 GPUs are no multiple of 8.
    assert [(step["gpus"], step["dp"], step["microbatches"]) for step in found["steps"]] == [
        (8, 1, 64),
        (16, 2, 32),
        (64, 8, 8),
    ]
    first = found["steps"][0]
    training, scoring = scale_costs.method_seconds("geomask", OutputWork(**found["head"]), scale_costs.H100)
    # One scoring pass: without a KL penalty NeMo-RL leaves the reference's out.
    assert first["loss_s"]["geomask"] == pytest.approx(64 * training + 32 * scoring)
    stage = (2 * found["model"]["active"] + 2 * 48 * 4096 * 8192) * 16_384 / 8 / (0.3 * 989e12)
    assert first["model_s"] == pytest.approx((64 + 1) * 3 * stage + (32 + 1) * 2 * stage)
    assert found["advised"] == "geomask"
    assert "NeMo-RL, fused needs policy.sequence_packing.enabled: false" in out
    assert "Advised: logprob_backend: geomask\n" in out
    assert "as now" in out
    assert "NeMo-RL, in chunks needs policy.megatron_cfg.defer_fp32_logits: true" in out
    assert "geomask with policy.megatron_cfg.defer_fp32_logits: true: 2.49 GB" in out


@pytest.mark.parametrize("engine", ["megatron_cfg", "dtensor_cfg"])
def test_recomputed_activations_cost_another_forward_pass_of_the_model(path, engine):
    engines = [f"++policy.{name}.enabled={str(name == engine).lower()}" for name in ("megatron_cfg", "dtensor_cfg")]

    def step(*overrides):
        return scale.estimate_scale(read_recipe(path, [*engines, *overrides]), gpus=(8,))["steps"][0]

    plain, other = step(), step("++policy.cpu_offload=true")
    assert other == plain
    recomputed = step(f"++policy.{engine}.activation_checkpointing=true")
    # Training takes a forward pass and two for the gradients, then one more; scoring takes one, without gradients.
    layout = {"megatron_cfg": (64 + 1, 32 + 1), "dtensor_cfg": (plain["microbatches"], plain["microbatches"] // 2)}
    training, scoring = layout[engine]
    if engine == "megatron_cfg":
        assert recomputed["model_s"] / plain["model_s"] == pytest.approx(
            (4 * training + 2 * scoring) / (3 * training + 2 * scoring)
        )
    assert recomputed["model_s"] > plain["model_s"]
    assert recomputed["loss_s"] == pytest.approx(plain["loss_s"])


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], 1),
        (["++loss_fn.reference_policy_kl_penalty=0.1"], 2),
        (["loss_fn.name=clipped_pg", "++loss_fn.force_on_policy_ratio=true"], 0),
        (
            [
                "loss_fn.name=clipped_pg",
                "++loss_fn.force_on_policy_ratio=true",
                "++grpo.seq_logprob_error_threshold=2.0",
            ],
            1,
        ),
    ],
)
def test_forward_passes_are_those_that_are_run(path, overrides, passes):
    found = scale.estimate_scale(read_recipe(path, overrides))
    assert found["passes"] == passes
    assert found["head"]["scored"] == (16_384 if passes else 0)


def test_v060_skips_no_forward_pass_and_has_no_chunks_in_training(path, tmp_path, monkeypatch):
    deferred = ["++policy.megatron_cfg.defer_fp32_logits=true", "++policy.logprob_chunk_size=256"]
    recipe = read_recipe(path, [*deferred, "loss_fn.name=clipped_pg", "++loss_fn.force_on_policy_ratio=true"])
    assert scale.estimate_scale(recipe)["now"] == "NeMo-RL, in chunks"
    monkeypatch.setattr(Recipe, "nemo_rl", tmp_path)
    found = scale.estimate_scale(dataclasses.replace(recipe))  # which has not looked yet
    assert (found["passes"], found["now"]) == (2, "NeMo-RL")
    assert found["refused"]["NeMo-RL, in chunks"] == "NeMo-RL v0.7.0 or later"
    assert "main" in found["refused"]["NeMo-RL, fused"]


def test_where_few_tokens_train_the_products_are_what_counts(path):
    recipe = read_recipe(path, ["++policy.sequence_packing.train_mb_tokens=262144"])
    assert scale.estimate_scale(recipe, trained=0.2)["advised"] == "geomask_linear"
    # 20 GB of logits: nothing but a tile is cheap.
    assert scale.estimate_scale(recipe)["advised"] == "geomask_linear"
    filtered = read_recipe(path, ["++policy.generation.top_p=0.9"])
    found = scale.estimate_scale(filtered)
    assert "top_p" in found["refused"]["geomask_linear"]
    assert found["advised"].startswith("NeMo-RL")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.model_name=a/b"], "a/b is neither a folder with a config.json nor a known model name"),
        (["policy.train_global_batch_size=null"], "the estimate needs both of these keys"),
        (["++loss_fn.kind=3"], "loss_fn.kind"),
    ],
)
def test_what_is_not_known_is_named(path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        scale.estimate_scale(read_recipe(path, overrides))
