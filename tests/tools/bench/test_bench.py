"""``bench``: what is timed and metered, how paths are chosen, what is printed and written, and its options."""

import importlib.util
import json
import math

import pytest
import torch

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.bench import logprobs, results
from nemo_geomask.tools.bench.logprob_paths import PATHS, LogprobCase
from nemo_geomask.tools.bench.meters import extra_memory, one_thread, peak_memory
from nemo_geomask.tools.bench.peers import Absent, Setting, select
from nemo_geomask.tools.bench.timing import Lap, compare, quartiles

CPU = torch.device("cpu")
OURS = ("geomask_linear", "geomask")
SMALL = LogprobCase(64, 16, 500, dtype=torch.float32)


def test_candidates_run_in_mixed_order_and_one_that_fails_is_left_out():
    order = []

    def candidate(name):
        def run(turn):
            order.append(name)
            if name == "b" and len(order) > 3:
                raise ValueError("gave up\nat length")
            if name == "d":
                raise Absent("needs a GPU")
            return Lap(1.0, 2.0, 0.5)

        return run

    rows = compare({name: candidate(name) for name in "abcd"}, 5, warmup=1)
    assert sorted(order[:4]) == ["a", "b", "c", "d"]
    assert order.count("a") == order.count("c") == 6
    later = [name for name in order[4:] if name != "b"]
    assert {("a", "c"), ("c", "a")} == set(zip(later[::2], later[1::2], strict=True))
    assert rows["b"] == {"status": "failed", "reason": "ValueError: gave up"}
    assert rows["d"] == {"status": "absent", "reason": "needs a GPU"}
    medians = {key: row["median"] for key, row in rows["a"].items() if key != "status"}
    assert medians == {"ms": 3000.0, "forward_ms": 1000.0, "backward_ms": 2000.0, "processor_ms": 500.0}
    assert rows["a"]["ms"]["runs"] == 5


def test_quartiles_are_of_the_values_themselves():
    assert quartiles([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "runs": 3}
    assert quartiles([3.0])["q1"] == 3.0


def test_memory_is_beyond_what_is_in_use_and_beyond_the_gradient():
    operand = torch.ones(1 << 24)
    peak = peak_memory(lambda: torch.ones(1 << 24), CPU)
    if peak is None:
        pytest.skip("this system does not let a process reset its peak memory")
    assert peak == pytest.approx(operand.nbytes, rel=0.05)
    assert abs(extra_memory(lambda: operand * 2, operand)) < 1 << 22
    assert abs(extra_memory(lambda: operand.mul_(2), operand)) < 1 << 22
    assert extra_memory(lambda: (operand * 2).exp().mul_(0.5) * 2, operand) == pytest.approx(operand.nbytes, rel=0.2)


def test_operations_are_counted_in_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_paths_are_chosen_by_name_or_part_of_it():
    assert select(PATHS, None) == PATHS
    assert all(list(select(PATHS, name)) == [name] for name in PATHS)
    assert list(select(PATHS, "fused, geomask,MCORE")) == ["geomask", "NeMo-RL, fused", "mcore"]
    assert list(select(PATHS, "geom")) == list(OURS)
    for text in ("geomask,flush", "geomask,"):
        with pytest.raises(ConfigError, match="no such path; there are: geomask_linear; geomask; NeMo-RL"):
            select(PATHS, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{}, {"fraction": 0.5, "temperature": 0.7}, {"entropy": True, "temperature": 0.7}, {"tp": 2, "fraction": 0.2}],
    ids=str,
)
def test_methods_agree_with_float64(change):
    case = SMALL._replace(**change)
    result = logprobs.measure(case, Setting(CPU), PATHS, 1, 0)
    json.dumps(result)
    rows = {row["path"]: row for row in result["paths"]}
    assert list(rows) == list(PATHS)
    measured = [row for row in rows.values() if row["status"] == "measured"]
    assert {*OURS, "torch"} <= {row["path"] for row in measured}
    for row in measured:
        assert row["errors"]["logprob"] < 1e-5, row["path"]
        assert row["errors"]["gradient"] < 1e-5, row["path"]
        assert row["of_products"] == pytest.approx(result["products"]["ms"]["median"] / row["ms"]["median"])
    for name in ("NeMo-RL", "NeMo-RL, in chunks", "NeMo-RL, fused", "mcore"):
        library = "nemo_rl" if name.startswith("NeMo") else "megatron"
        refuses = case.entropy and name != "NeMo-RL, in chunks"
        expected = "measured" if importlib.util.find_spec(library) else "absent"
        assert rows[name]["status"] == ("not applicable" if refuses else expected), rows[name]


def test_a_wrong_gradient_is_seen():
    def wrong(sample, case, setting):
        logprobs, entropy = PATHS["torch"](sample, case, setting)
        return logprobs.detach() + 1.1 * (logprobs - logprobs.detach()), entropy

    def broken(sample, case, setting):
        raise RuntimeError("no kernel image")

    result = logprobs.measure(SMALL, Setting(CPU), {"wrong": wrong, "broken": broken}, 1, 0)
    wrong_row, broken_row = result["paths"]
    assert wrong_row["errors"]["gradient"] == pytest.approx(0.1, rel=1e-3)
    assert (broken_row["status"], broken_row["reason"]) == ("failed", "RuntimeError: no kernel image")
    text = logprobs.format_case({"title": str(SMALL), **result})
    assert "T=64, H=16, V=500, float32: logits of 0 MB" in text
    assert "  broken: failed: RuntimeError: no kernel image" in text


def test_a_figure_that_is_missing_is_a_dash():
    columns = (results.figure("a", "x", "y", scale=10), results.figure("b", "z", form="{:.0e}"))
    rows = [{"x": {"y": 1234}, "z": 0.012}, {"x": {"y": 12.345}, "z": math.nan}, {"x": None}]
    assert results.cells(columns, rows) == [["123", "1e-02"], ["1.23", "nan"], ["–", "–"]]


def test_logprobs_are_measured_as_the_options_say(tmp_path, capsys):
    sizes = "--device cpu --tokens 8,16 --hidden 4 --vocab 50 --repeats 1 --threads 1 --paths geom"
    assert main(["bench", "logprobs", *sizes.split(), "--entropy", "off,on", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert (written["version"], written["benchmark"], written["machine"]["device"]) == (1, "logprobs", "cpu")
    titles = ["T=8, H=4, V=50, float32", "T=16, H=4, V=50, float32", "T=8, H=4, V=50, float32, with entropy"]
    assert [case["title"] for case in written["cases"]] == titles
    assert [row["path"] for row in written["cases"][0]["paths"]] == list(OURS)
    printed = capsys.readouterr().out
    assert all(title in printed for title in titles)


def test_losses_are_measured_beside_nemo_rls(tmp_path, capsys):
    sizes = "--device cpu --batch 2,32 --repeats 1"
    assert main(["bench", "loss", *sizes.split(), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("loss-*.json")
    rows = json.loads(path.read_text())["on_logprobs"]
    assert {row["how"] for row in rows} == {"padded", "padded, metrics: nemo_rl", "packed", "NeMo-RL, padded"}
    has_nemo_rl = importlib.util.find_spec("nemo_rl") is not None
    for row in rows:
        is_absent = row["how"] == "NeMo-RL, padded" and not has_nemo_rl
        assert row["status"] == ("absent" if is_absent else "measured"), row
        assert is_absent or row["launches"] > 50
    assert "2 sequences of up to 32 tokens" in capsys.readouterr().out


def test_without_a_benchmark_three_run_with_their_defaults(monkeypatch):
    runs = []

    def run_benchmark(name, options, device):
        runs.append((name, options.repeats, getattr(options, "tokens", options.seed)))
        return 0

    monkeypatch.setattr("nemo_geomask.tools.bench.command.run_benchmark", run_benchmark)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 0
    assert runs == [("logprobs", 5, [256]), ("loss", 9, 0), ("step", 5, [256])]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "step", "--repeats", "2"]) == 0
    assert runs[-1] == ("step", 2, [8192, 32_768])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("logprobs --tokens 0", "'0' is not a whole number above 0"),
        ("logprobs --fractions 1.5", "'1.5' is not a fraction above 0 and up to 1"),
        ("logprobs --entropy maybe", "'maybe' is neither off nor on"),
        ("logprobs --dtypes int8", "'int8' is none of bfloat16"),
        ("loss --batch 2,32,4", "'2,32,4' is not two numbers"),
        ("step --vocab 50,60", "'50,60' is not a whole number above 0"),
        ("scale", "the following arguments are required: RECIPE.yaml"),
        ("scale r.yaml --fractions 1,0.5", "'1,0.5' is not a number above 0"),
    ],
)
def test_a_mistaken_option_is_named_by_the_parser(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("logprobs --vocab 16,9 --tp 8", "--vocab 9 can't be divided into --tp 8 equal shards; use a multiple of 8"),
        ("logprobs --paths none", "'none': no such path; there are: geomask_linear; geomask"),
        ("step --heads 3 --hidden 8", "--hidden 8 can't be divided among --heads 3; use a multiple of 3"),
        ("step --tokens 1,8", "--tokens 1: bench step needs at least 2"),
        ("step --paths none", "'none': no such path; there are: nemo_geomask, logprob_backend: geomask_linear"),
    ],
)
def test_options_that_do_not_go_together_are_named(words, message, capsys):
    assert main(["bench", *words.split(), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "step", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU here; use --device cpu" in capsys.readouterr().err
