"""``bench step``: every path is held to loops in float64, and the longest sequence to a meter that is known."""

import importlib.util
import json
import math

import pytest
import torch

from nemo_geomask.cli import main
from nemo_geomask.tools.bench import step
from nemo_geomask.tools.bench.decoder import PATHS, REFERENCE, StepCase, build_decoder, draw_step_batch
from nemo_geomask.tools.bench.peers import Absent, Setting
from nemo_geomask.tools.bench.results import format_rows

SETTING = Setting(torch.device("cpu"))
TINY = StepCase(tokens=12, vocab=50, layers=2, hidden=8, heads=2, dtype=torch.float32)
NAMES = tuple(PATHS)
OURS = [name for name in NAMES if name.startswith("nemo_geomask")]
TINY_SIZES = "--device cpu --tokens 8,12 --vocab 50 --layers 1 --hidden 8 --heads 2 --repeats 1"


def norm(x, weight):
    scale = math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + torch.finfo(torch.float32).eps)
    return torch.stack([v / scale * w for v, w in zip(x, weight, strict=True)])


def oracle_states(weights, layers, heads, ids):
    """Hidden states of a decoder, one position and one head at a time."""
    rows = [weights["embedding.weight"][i] for i in ids]
    for layer in range(layers):
        w = {key.removeprefix(f"layers.{layer}."): value for key, value in weights.items()}
        projected = [w["query_key_value.weight"] @ norm(row, w["attention_norm.weight"]) for row in rows]
        size, after = len(rows[0]) // heads, []
        for position, row in enumerate(rows):
            parts = []
            for head in range(heads):
                q, k, v = (
                    slice((which * heads + head) * size, (which * heads + head + 1) * size) for which in range(3)
                )
                scores = [
                    math.exp(float(projected[position][q] @ projected[t][k]) / math.sqrt(size))
                    for t in range(position + 1)
                ]
                parts.append(sum(s / sum(scores) * projected[t][v] for t, s in enumerate(scores)))
            row = row + w["attention_output.weight"] @ torch.cat(parts)
            up = w["mlp_up.weight"] @ norm(row, w["mlp_norm.weight"])
            after.append(row + w["mlp_down.weight"] @ torch.stack([u / (1 + math.exp(-float(u))) for u in up]))
        rows = after
    return [norm(row, weights["norm.weight"]) for row in rows]


def oracle_loss(weights, layers, heads, batch):
    """clipped_pg with NeMo-RL's defaults: -min(r·A, clip(r, 0.8, 1.2)·A) + 0.01·k3, averaged over the tokens."""
    data = {key: value[0].tolist() if value.dim() == 2 else value.tolist() for key, value in batch.data.items()}
    ids = data["input_ids"]
    states, total = oracle_states(weights, layers, heads, ids), 0.0
    for t in range(1, len(ids)):
        logits = (weights["head.weight"] @ states[t - 1]).tolist()
        curr = logits[ids[t]] - math.log(sum(math.exp(x) for x in logits))
        ratio, advantage = math.exp(curr - data["prev_logprobs"][t]), data["advantages"][t]
        clipped = min(max(ratio, 0.8), 1.2)
        log_ratio = data["reference_policy_logprobs"][t] - curr
        total += -min(ratio * advantage, clipped * advantage) + 0.01 * (math.exp(log_ratio) - log_ratio - 1)
    return total / (len(ids) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_path_is_the_step_of_loops_in_float64(name):
    decoder = build_decoder(TINY, SETTING.device, seed=3)
    batch = draw_step_batch(decoder, TINY.tokens, seed=4)
    try:
        loss = PATHS[name](SETTING)
    except Absent as reason:
        pytest.skip(str(reason))
    value = loss(decoder(batch.data["input_ids"]), decoder.head.weight, batch)
    gradients = torch.autograd.grad(value, tuple(decoder.parameters()))

    weights = {key: value.detach().double() for key, value in decoder.named_parameters()}
    assert float(value.detach()) == pytest.approx(oracle_loss(weights, TINY.layers, TINY.heads, batch), abs=1e-5)
    # The gradient of each weight along a random direction, by a central difference of the loops.
    source = torch.Generator().manual_seed(5)
    for (key, weight), gradient in zip(list(weights.items()), gradients, strict=True):
        direction = torch.randn(weight.shape, generator=source, dtype=torch.float64)
        step = 1e-5 * direction / direction.norm()
        up, down = (
            oracle_loss({**weights, key: weight + sign * step}, TINY.layers, TINY.heads, batch) for sign in (1, -1)
        )
        slope = float((gradient.double() * direction / direction.norm()).sum())
        assert slope == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=2e-5), key


def test_sequences_train_all_tokens_but_the_first():
    decoder = build_decoder(TINY, SETTING.device, seed=0)
    batch = draw_step_batch(decoder, 9, seed=1)
    assert (int(batch.valid_seqs), int(batch.valid_toks)) == (1, 8)
    assert batch.data["token_mask"].tolist() == [[0.0] + [1.0] * 8]
    again = draw_step_batch(build_decoder(TINY, SETTING.device, seed=0), 9, seed=1)
    assert all(torch.equal(batch.data[key], again.data[key]) for key in batch.data)
    logprobs = torch.log_softmax(decoder.head(decoder(batch.data["input_ids"])), -1)[:, :-1]
    curr = logprobs.gather(-1, batch.data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    assert float((curr - batch.data["prev_logprobs"][:, 1:]).detach().abs().max()) < 0.1


def test_a_path_that_disagrees_or_fails_is_not_timed():
    reference = PATHS[REFERENCE](SETTING)

    def wrong(hidden, weight, batch):
        return 1.01 * reference(hidden, weight, batch)

    def broken(hidden, weight, batch):
        raise RuntimeError("no kernel image")

    losses = {"wrong": wrong, "broken": broken, OURS[0]: PATHS[OURS[0]](SETTING)}
    result = step.measure(TINY, SETTING, losses, 1, 0)
    json.dumps(result)
    off, failed, ours = result["paths"]
    assert off["status"] == "failed"
    assert off["errors"]["gradient"] == pytest.approx(0.01, rel=1e-3)
    assert "gradient by 1.0e-02; the tolerance is 0.0001" in off["reason"]
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert "ms" not in off
    assert ours["status"] == "measured"
    assert max(ours["errors"].values()) < 1e-4
    assert ours["of_decoder"] == pytest.approx(ours["ms"]["median"] / result["decoder"]["ms"]["median"])
    title = step.format_title({"title": str(TINY), **result})
    assert "agree within 0.0001" in title
    assert "broken: failed: RuntimeError: no kernel image" in format_rows(title, step.COLUMNS, result["paths"])


def test_half_precision_agrees_within_its_tolerance():
    losses = {name: PATHS[name](SETTING) for name in OURS}
    result = step.measure(TINY._replace(dtype=torch.bfloat16), SETTING, losses, 1, 0)
    assert [row["status"] for row in result["paths"]] == ["measured"] * 2


@pytest.mark.parametrize("limit", [0, 15, 16, 17, 40, 100, 101, 1000, 4095, 100_000])
@pytest.mark.parametrize("start", [16, 100, 4096])
def test_longest_length_is_found_to_a_sixteenth(limit, start):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    low, high = step.find_longest(fits, start, longest=4096)
    assert tried[0] == start
    assert all(16 <= length <= 4096 for length in tried)
    assert len(tried) < 20
    assert low <= limit
    if high is None:
        assert low > 4096 * 15 / 16
    else:
        assert high > limit
        assert high - low <= max(16, low / 16)


def test_longest_steps_under_a_limit_and_out_of_memory(monkeypatch):
    reference, lengths = PATHS[REFERENCE](SETTING), []

    def small(hidden, weight, batch):
        lengths.append(hidden.shape[1])
        return reference(hidden, weight, batch)

    def large(hidden, weight, batch):
        if hidden.shape[1] > 100:
            raise torch.OutOfMemoryError("no memory")
        return small(hidden, weight, batch)

    def peak_memory(run, device):  # of which each token takes 10 bytes
        run()
        return 10 * lengths[-1]

    monkeypatch.setattr(step, "peak_memory", peak_memory)
    losses = {"small": small, "large": large}
    result = step.find_longest_steps(TINY, SETTING, losses, memory_limit=5000.0)
    first, second = result["paths"]
    assert 500 - 500 / 16 < first["tokens"] <= 500 < first["too_long"]
    assert 84 <= second["tokens"] <= 100 < second["too_long"]
    assert "at most 5e-06 GB beyond weights and batch, a chosen limit" in step.longest_title(result)
    assert "torch runs out of memory" in step.longest_title({"limit_bytes": None})
    assert f"≥ {first['tokens']}" in format_rows("", step.LONGEST_COLUMNS, [{**first, "too_long": None}])
    monkeypatch.setattr(step, "peak_memory", lambda run, device: None)
    row, _ = step.find_longest_steps(TINY, SETTING, losses, memory_limit=1.0)["paths"]
    assert row["reason"] == "OSError: this system does not let a process reset its peak memory"


def test_command_writes_json_and_says_what_is_absent(tmp_path, capsys):
    assert main(["bench", "step", *TINY_SIZES.split(), "--memory-limit", "1e-9", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert [case["case"]["tokens"] for case in written["cases"]] == [8, 12]
    assert written["cases"][0]["case"]["dtype"] == "float32"
    assert written["longest"]["limit_bytes"] == pytest.approx(1.0)
    printed = capsys.readouterr().out
    assert "T=8, 1 layer, H=8, V=50, float32" in printed
    has_nemo_rl = importlib.util.find_spec("nemo_rl") is not None
    for case in (*written["cases"], written["longest"]):
        assert [row["path"] for row in case["paths"]] == list(NAMES)
        for row in case["paths"]:
            is_absent = row["path"].startswith("NeMo-RL") and not has_nemo_rl
            assert row["status"] == ("absent" if is_absent else "measured"), row
            if is_absent:
                assert f"{row['path']}: absent: nemo_rl.distributed.model_utils can't be imported" in printed
