"""``bench scale``: its formulas against values by hand, and its costs against the figures that they are from."""

import copy
import dataclasses
import functools
import json
import math
import os
import time
from pathlib import Path

import pytest
import yaml

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import Recipe, read_recipe
from nemo_geomask.tools.bench import scale_bench, scale_costs
from nemo_geomask.tools.check import LOGPROB_METHODS, ModelShape, OutputWork

MEASURED = Path(__file__).parents[3] / "docs" / "performance"
LINEAR, LOGPROBS = (
    json.loads((MEASURED / f"{name}.json").read_text())
    for name in ("linear-nvidia-h100-80gb-hbm3-2026-11-27", "logprobs-nvidia-h100-80gb-hbm3-2026-11-26")
)
MISSING = object()
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
    assert scale_bench.step_seconds(2.0, 0.5, stages=3, microbatches=4) == 4 + 4 * 2.5
    assert scale_bench.model_flops(ModelShape(0, 0, layers=2, attention=3, active=100), 10, length=4) == 10 * (
        200 + 2 * 2 * 3 * 4
    )


def test_costs_are_those_measured():
    found = scale_costs.read_costs(LINEAR, LOGPROBS, peak=989e12)
    assert found.gpu == scale_costs.H100.gpu
    for mine, theirs in (
        (found.with_logits, scale_costs.H100.with_logits),
        (found.without_logits, scale_costs.H100.without_logits),
    ):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name
    assert found.products == pytest.approx(scale_costs.H100.products, rel=1e-3)


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


def test_a_recipe(path, capsys, tmp_path):
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
    found = scale_bench.estimate_scale(read_recipe(path, overrides))
    assert found["passes"] == passes
    assert found["head"]["scored"] == (16_384 if passes else 0)


def test_v060_skips_no_forward_pass_and_has_no_chunks_in_training(path, tmp_path, monkeypatch):
    deferred = ["++policy.megatron_cfg.defer_fp32_logits=true", "++policy.logprob_chunk_size=256"]
    recipe = read_recipe(path, [*deferred, "loss_fn.name=clipped_pg", "++loss_fn.force_on_policy_ratio=true"])
    assert scale_bench.estimate_scale(recipe)["now"] == "NeMo-RL, in chunks"
    monkeypatch.setattr(Recipe, "nemo_rl", tmp_path)
    found = scale_bench.estimate_scale(dataclasses.replace(recipe))  # which has not looked yet
    assert (found["passes"], found["now"]) == (2, "NeMo-RL")
    assert found["refused"]["NeMo-RL, in chunks"] == "NeMo-RL v0.7.0 or later"
    assert "main" in found["refused"]["NeMo-RL, fused"]


def test_where_few_tokens_train_the_products_are_what_counts(path):
    recipe = read_recipe(path, ["++policy.sequence_packing.train_mb_tokens=262144"])
    assert scale_bench.estimate_scale(recipe, trained=0.2)["advised"] == "geomask_linear"
    # 20 GB of logits: nothing but a tile is cheap.
    assert scale_bench.estimate_scale(recipe)["advised"] == "geomask_linear"
    filtered = read_recipe(path, ["++policy.generation.top_p=0.9"])
    found = scale_bench.estimate_scale(filtered)
    assert "top_p" in found["refused"]["geomask_linear"]
    assert found["advised"].startswith("NeMo-RL")


def test_own_measurements(path, tmp_path, capsys):
    arguments = ["bench", "scale", str(path), "--measured", str(tmp_path)]
    assert main(arguments) == 2
    assert "has 0 files linear-*.json, but needs exactly one" in capsys.readouterr().err
    for name, result in (("linear", LINEAR), ("logprobs", LOGPROBS)):
        (tmp_path / f"{name}-gpu.json").write_text(json.dumps(result))
    assert main([*arguments, "--peak", "500"]) == 0
    assert "500 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "linear-gpu.json is not what nemo-geomask bench linear --out"),
        ("[]", "linear-gpu.json is not what nemo-geomask bench linear --out"),
        ("{", "linear-gpu.json: not valid JSON"),
        ("[" * 100_000, "linear-gpu.json: mappings and lists are nested more than 100 deep"),
        ("[" + "0," * 300_000 + "0]", "linear-gpu.json: there are more than 200,000 values"),
        ('{"a": ' + "1" * 5000 + "}", "linear-gpu.json: an integer has more than 1,000 digits"),
        ("\0", "linear-gpu.json: not valid JSON"),
        ('{"benchmark": "linear"}', "linear-gpu.json: cases is missing, but must be a list of objects"),
        ('{"benchmark": "linear", "cases": []}', "linear-gpu.json has no case in which all tokens train"),
    ],
)
def test_files_of_something_else_are_said(text, message, path, tmp_path, capsys):
    (tmp_path / "logprobs-gpu.json").write_text(json.dumps(LOGPROBS))
    (tmp_path / "linear-gpu.json").write_text(text)
    assert main(["bench", "scale", str(path), "--measured", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def refusal(path, folder, capsys):
    """Return the only line that ``bench scale`` prints about the files in a folder, which it refuses at once."""
    before = time.process_time()
    assert main(["bench", "scale", str(path), "--measured", str(folder)]) == 2
    assert time.process_time() - before < 5
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert len(error) < 1000
    return error


def test_a_file_that_cannot_be_read_is_said(path, tmp_path, capsys):
    file = tmp_path / "linear-gpu.json"
    os.mkfifo(file)
    assert f"{file}: is a FIFO, not a regular file" in refusal(path, tmp_path, capsys)
    file.unlink()
    file.mkdir()
    assert f"{file} can't be read: Is a directory" in refusal(path, tmp_path, capsys)
    file.rmdir()
    file.write_bytes(b"\xff")
    assert f"{file} can't be read: 'utf-8' codec can't decode" in refusal(path, tmp_path, capsys)
    with file.open("wb") as large:
        large.truncate(2**31)  # takes no space
    assert f"{file}: the file has more than 4,000,000 bytes (2,147,483,648 here)" in refusal(path, tmp_path, capsys)


@pytest.mark.parametrize(
    ("name", "keys", "value", "message"),
    [
        ("linear", "cases", 5, "cases is 5, but must be a list of objects"),
        ("linear", "cases", [5], "cases is [5], but must be a list of objects"),
        ("logprobs", "cases", None, "cases is None, but must be a list of objects"),
        ("linear", "cases 0 case", [1], "cases[0].case is [1], but must be an object"),
        ("linear", "cases 0 case", MISSING, "cases[0].case is missing, but must be an object"),
        ("linear", "cases 0 case tp", 0, "cases[0].case.tp is 0, but must be a whole number from 1 to 1e+15"),
        ("logprobs", "cases 0 case tp", 0, "cases[0].case.tp is 0, but must be a whole number"),
        ("logprobs", "cases 0 case vocab", 1.5, "cases[0].case.vocab is 1.5, but must be a whole number"),
        ("linear", "cases 0 case tokens", True, "cases[0].case.tokens is True, but must be a whole number"),
        ("linear", "cases 0 case tokens", "8", "cases[0].case.tokens is '8', but must be a whole number"),
        ("linear", "cases 0 case hidden", 10**400, "cases[0].case.hidden is 1000"),
        ("linear", "cases 0 case hidden", MISSING, "cases[0].case.hidden is missing"),
        *(
            (
                "linear",
                "cases 0 products_tflop_s",
                value,
                f"cases[0].products_tflop_s is {value!r}, but must be a number",
            )
            for value in ("x", 0, -1, math.nan, math.inf, 1e-320, None, {}, False)
        ),
        ("linear", "cases 0 products_tflop_s", MISSING, "cases[0].products_tflop_s is missing"),
        ("linear", "cases 0 paths", {}, "cases[0].paths is {}, but must be a list of objects"),
        ("linear", "cases 0 paths", ["x"], "cases[0].paths is ['x'], but must be a list of objects"),
        ("linear", "cases 0 paths", [{}], "'NeMo-RL fused linear (1024)' was not measured in "),
        ("linear", "cases 0 paths", [{"path": [], "status": "measured"}], "was not measured in "),
        ("logprobs", "cases 0 paths 0 forward_ms", {}, "cases[0].paths[0].forward_ms.median is missing"),
        ("logprobs", "cases 0 paths 0 forward_ms", 3, "cases[0].paths[0].forward_ms is 3, but must be an object"),
        ("logprobs", "cases 0 paths 0 backward_ms median", math.nan, "cases[0].paths[0].backward_ms.median is nan"),
        ("linear", "machine", MISSING, "machine is missing, but must be an object"),
        ("linear", "machine", "H100", "machine is 'H100', but must be an object"),
        ("linear", "machine torch", MISSING, "machine.torch is missing, but must be printable text"),
        ("linear", "machine name", "a\nb", "machine.name is 'a\\nb', but must be printable text"),
        ("linear", "machine name", "\ud800", "machine.name is '\\ud800', but must be printable text"),
        ("linear", "machine date", "2" * 10_000, "machine.date is '2222"),
    ],
)
def test_a_value_that_is_no_measurement_is_said(name, keys, value, message, path, tmp_path, capsys):
    results = {"linear": copy.deepcopy(LINEAR), "logprobs": copy.deepcopy(LOGPROBS)}
    *parents, last = (int(key) if key.isdigit() else key for key in keys.split())
    parent = functools.reduce(lambda container, key: container[key], parents, results[name])
    if value is MISSING:
        del parent[last]
    else:
        parent[last] = value
    for stem, result in results.items():
        (tmp_path / f"{stem}-gpu.json").write_text(json.dumps(result))
    error = refusal(path, tmp_path, capsys)
    assert message in error
    assert str(tmp_path / f"{name}-gpu.json") in error


def test_costs_are_of_whole_rows_without_entropy():
    others = [case for case in LINEAR["cases"] if case["case"]["entropy"] or case["case"]["fraction"] < 1]
    broken = {"case": LINEAR["cases"][0]["case"], "error": "out of memory"}
    first = scale_costs.read_costs(LINEAR, LOGPROBS, peak=1e15)
    assert (
        scale_costs.read_costs({**LINEAR, "cases": [*others, broken, *LINEAR["cases"]]}, LOGPROBS, peak=1e15) == first
    )
    with pytest.raises(ConfigError, match="bench linear with --fractions 1 and --entropy off"):
        scale_costs.read_costs({**LINEAR, "cases": others}, LOGPROBS, peak=1e15)


def test_a_path_that_was_not_measured_is_said():
    absent = "NeMo-RL DistributedLogprob of logits.float()"
    case = LOGPROBS["cases"][0]
    rows = [row if row["path"] != absent else {"path": absent, "status": "absent"} for row in case["paths"]]
    with pytest.raises(ConfigError, match="was not measured in .*where NeMo-RL is importable"):
        scale_costs.read_costs(LINEAR, {**LOGPROBS, "cases": [{**case, "paths": rows}]}, peak=1e15)


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
        scale_bench.estimate_scale(read_recipe(path, overrides))


def test_options_of_the_others_are_refused(path, capsys):
    for arguments in (
        ["scale"],
        ["scale", str(path), "--tokens", "5", "--grid"],
        ["linear", "--gpus", "8"],
        ["--mfu", "1"],
    ):
        assert main(["bench", *arguments]) == 2
    assert "bench scale needs a recipe" in capsys.readouterr().err
