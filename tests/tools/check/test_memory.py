"""Sizes of models by name and configuration, and the bytes of the way from hidden states to log-probs."""

import json
from pathlib import Path

import pytest
import torch

from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.parallel.linear import TILE_BYTES
from nemo_geomask.tools.check.logit_memory import GPU_TILE_BYTES, LOGPROB_METHODS, OutputWork
from nemo_geomask.tools.check.model_shapes import ModelShape, shape_from_config, shape_of
from tests.helpers.memory import peak_memory

PERFORMANCE = Path(__file__).parents[3] / "docs" / "performance"
MEASURED_ON = {"linear": "2026-11-27", "logprobs": "2026-11-26"}


def measured(benchmark):
    name = f"{benchmark}-nvidia-h100-80gb-hbm3-{MEASURED_ON[benchmark]}.json"
    return json.loads((PERFORMANCE / name).read_text())["cases"]


@pytest.mark.parametrize(
    ("name", "hidden", "vocab", "billions"),
    [
        # As their makers give them; embeddings and output layer taken out by hand.
        ("Qwen/Qwen3-30B-A3B", 2048, 151_936, 3.3 - 0.6),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", 4096, 151_936, 22.2 - 1.2),
        ("Qwen/Qwen3-8B", 4096, 151_936, 6.95),
        ("Qwen/Qwen3-0.6B", 1024, 151_936, 0.44),
        ("deepseek-ai/DeepSeek-V3", 7168, 129_280, 37.4 - 1.8),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1536, 151_936, 1.31),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 4096, 128_256, 7.0),
        ("moonshotai/Kimi-K2-Instruct", 7168, 163_840, 32.7 - 2.3),
        ("moonshotai/Moonlight-16B-A3B", 2048, 163_840, 2.24),
        ("openai/gpt-oss-20b", 2880, 201_088, 3.6 - 0.6),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 4096, 32_000, 12.9 - 0.3),
        ("meta-llama/Llama-3.2-1B-Instruct", 2048, 128_256, 0.97),
        ("Qwen/Qwen2.5-Math-7B", 3584, 152_064, 6.53),
    ],
)
def test_models_are_known_by_their_names(name, hidden, vocab, billions):
    shape = shape_of(name)
    assert (shape.hidden, shape.vocab) == (hidden, vocab)
    assert shape.active == pytest.approx(1e9 * billions, rel=0.03)


def test_shape_of_a_configuration(tmp_path):
    sizes = {"hidden_size": 8, "vocab_size": 100, "num_hidden_layers": 3, "num_attention_heads": 2}
    # Queries and output 8 x 8, keys and values 8 x 4; a gated MLP of 32, by hand.
    config = {**sizes, "num_key_value_heads": 1, "intermediate_size": 32}
    assert shape_from_config(config) == ModelShape(
        8, 100, 3, 8, 3 * (2 * 64 + 2 * 32 + 3 * 8 * 32), heads=2, kv_heads=1, mlp=32
    )
    mixture = {**config, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 1}
    assert shape_from_config(mixture).mlp == 5
    attention = 3 * 192
    assert shape_from_config({**mixture, "first_k_dense_replace": 1}).active == attention + 3 * 8 * (32 + 2 * 15)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert shape_of(str(tmp_path)) == shape_from_config(config)
    assert shape_from_config({"hidden_size": 8}) is None
    assert shape_of("a/model") is None


def test_bytes_by_hand():
    head = OutputWork(rows=1000, scored=0, hidden=8, columns=50, chunk=100, trained=0.5)
    found = {name: method.peak(head) for name, method in LOGPROB_METHODS.items()}
    assert found == {
        "NeMo-RL": 700_000,
        "NeMo-RL, in chunks": 200_000 + 120_000,
        "NeMo-RL, fused": 4000 + 1_000_000 + 64_000,
        "geomask": 200_000,
        "geomask_linear": 50_000 + 16_000 + 8000 + 800,
    }
    wide = head._replace(rows=40)
    assert LOGPROB_METHODS["geomask_linear"].peak(wide) == 2000 + 640 + 320 + 800
    # Few rows of many numbers: at the output weight there are the logits' gradient and the weight's.
    deep = head._replace(rows=40, hidden=1000)
    for method in ("geomask", "NeMo-RL"):
        assert LOGPROB_METHODS[method].peak(deep) == max(LOGPROB_METHODS[method].peak(wide), 4000 + 100_000)
        assert LOGPROB_METHODS[method].peak(deep._replace(fused_gradient=True)) == LOGPROB_METHODS[method].peak(wide)


def test_bytes_of_several_tiles_by_hand():
    """The smaller one of the two gradients is summed in float32: here the weight's, then the hidden states'."""
    head = OutputWork(rows=100_000, scored=0, hidden=8, columns=10_000, trained=0.5)
    training = LOGPROB_METHODS["geomask_linear"].training
    assert training(head) == GPU_TILE_BYTES + 1_600_000 + 800_000 + 160_000 + 320_000
    wide = head._replace(rows=10_000, columns=100_000)
    assert training(wide) == GPU_TILE_BYTES + 160_000 + 80_000 + 1_600_000 + 160_000


def test_bytes_of_float32_logits_by_hand():
    head = OutputWork(rows=1000, scored=0, hidden=8, columns=50, logit_bytes=4)
    found = {name: LOGPROB_METHODS[name].peak(head) for name in ("NeMo-RL", "geomask")}
    # There is no copy to make, but the gradient is as wide.
    assert found == {"NeMo-RL": 12 * 50_000, "geomask": 8 * 50_000}


def test_bytes_of_scoring_by_hand():
    head = OutputWork(rows=1, scored=1000, hidden=8, columns=50)
    assert {name: method.peak(head) for name, method in LOGPROB_METHODS.items()} == {
        "NeMo-RL": 700_000,
        "NeMo-RL, in chunks": 700_000,
        "NeMo-RL, fused": 700_000 + 32_000,
        "geomask": 100_000,
        "geomask_linear": 100_000 + 16_000,
    }
    whole = head._replace(logit_bytes=4)
    assert LOGPROB_METHODS["NeMo-RL"].peak(whole) == 600_000
    # The two bytes that they are cast from.
    assert LOGPROB_METHODS["geomask"].peak(whole) == 300_000
    # Of DTensor v1, whose forward passes have logits whoever trains.
    assert LOGPROB_METHODS["geomask_linear"].peak(whole._replace(v1=True)) == 300_000
    for name in ("NeMo-RL", "NeMo-RL, in chunks"):
        assert LOGPROB_METHODS[name].peak(head._replace(chunk=100)) == 100_000 + 60_000


@pytest.mark.parametrize(
    ("method", "benchmark", "path", "beyond"),
    [
        # What the meter does not count: the logits and their gradient, or the gradients of weight and hidden states.
        ("NeMo-RL", "logprobs", "NeMo-RL DistributedLogprob of logits.float()", lambda head: 4 * head.logits),
        ("NeMo-RL, in chunks", "logprobs", "NeMo-RL ChunkedDistributedLogprob(256)", lambda head: 4 * head.logits),
        (
            "NeMo-RL, fused",
            "linear",
            "NeMo-RL fused linear (1024)",
            lambda head: 2 * (head.columns + head.rows) * head.hidden,
        ),
        ("geomask", "logprobs", "nemo_geomask", lambda head: 4 * head.logits),
        (
            "geomask_linear",
            "linear",
            "nemo_geomask linear_logprobs",
            lambda head: 2 * (head.columns + head.rows) * head.hidden,
        ),
    ],
)
def test_bytes_as_a_gpu_held_them(method, benchmark, path, beyond):
    for result in measured(benchmark):
        case = result["case"]
        if case["entropy"] or "error" in result:
            continue
        head = OutputWork(
            case["tokens"],
            case["tokens"],
            case.get("hidden", 0),
            case["vocab"] // case["tp"],
            chunk=256 if "(256)" in path else 1024,
            trained=case["fraction"],
        )
        found = next(row for row in result["paths"] if row["path"] == path)["extra_bytes"] + beyond(head)
        # The hidden states' copy is the worker's, which the benchmark has not.
        expected = LOGPROB_METHODS[method].training(head) - (
            2 * head.rows * head.hidden if method == "geomask_linear" else 0
        )
        assert found == pytest.approx(expected, rel=0.06), result["title"]


def test_bytes_at_the_output_weight_as_a_gpu_held_them():
    for result in measured("linear"):
        case = result["case"]
        head = OutputWork(case["tokens"], 0, case["hidden"], case["vocab"] // case["tp"])
        # There the logits' gradient takes the place of the logits, so that this is the peak.
        found = next(row for row in result["paths"] if row["path"] == "nemo_geomask with logits")["extra_bytes"]
        assert found + 2 * head.columns * head.hidden == pytest.approx(head.weight_gradient_peak, rel=0.01)


@pytest.mark.slow
def test_bytes_as_a_cpu_holds_them():
    rows, columns, size = 512, 40_000, 32
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, size, generator=draw).bfloat16().requires_grad_()
    weight = torch.randn(columns, size, generator=draw).bfloat16().requires_grad_()
    targets = torch.randint(0, columns, (rows,), generator=draw)

    def with_logits():
        logits = torch.nn.functional.linear(hidden, weight)
        return torch.autograd.grad(vocab_parallel_logprobs(logits, targets).sum(), weight)[0]

    def without():
        # The default tile would hold all of them in a test of this size.
        found = linear_logprobs(hidden, weight, targets, tile_bytes=4 << 20)
        return torch.autograd.grad(found.sum(), [hidden, weight])[1]

    extra = [peak_memory(step, weight) for step in (with_logits, without)]
    head = OutputWork(rows, rows, size, columns)
    assert extra[0] == pytest.approx(LOGPROB_METHODS["geomask"].training(head), rel=0.25)
    assert extra[1] < 0.5 * extra[0]


def test_the_size_of_a_tile_is_the_kernels_own():
    assert TILE_BYTES["cuda"] == GPU_TILE_BYTES
