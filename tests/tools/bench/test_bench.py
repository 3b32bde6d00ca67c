"""The benchmark: what its meters count, that its peers compute the same, and what it says of what it can't measure."""

import importlib.util
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path as File

import pytest
import torch

from nemo_geomask.cli import main
from nemo_geomask.errors import ArgumentError, ConfigError
from nemo_geomask.kernels import KERNELS
from nemo_geomask.tools.bench import bench_arguments, command, performance_page, result_tables, speed_targets, traffic
from nemo_geomask.tools.bench.logprob_bench import measure, sweep
from nemo_geomask.tools.bench.logprob_cases import LogprobCase, PathOutput, RandomInputs, measure_errors
from nemo_geomask.tools.bench.paths import OURS, PATHS, Absent, LogprobPath, Setting
from nemo_geomask.tools.bench.paths.path import output_by_autograd
from nemo_geomask.tools.bench.resource_meters import DispatchCounter, extra_memory
from nemo_geomask.tools.bench.timing import Lap, interleave, quartiles
from tests.tools.bench.operand_bytes import OperandBytes

NAMES = tuple(path.name for path in PATHS)
CPU = torch.device("cpu")
SMALL = LogprobCase(tokens=40, vocab=3000)
TEMPERED = SMALL._replace(fraction=0.5, temperature=0.7)


def opened(name, case, setting):
    path = next(path for path in PATHS if path.name == name)
    try:
        return path, path.prepare(case, setting)
    except Absent as reason:
        pytest.skip(str(reason))


EAGER = [path.name for path in PATHS if path.traffic_source and not path.name.startswith("nemo_geomask")][:6]


@pytest.fixture
def setting():
    setting = Setting(CPU)
    yield setting
    setting.close()


@pytest.mark.parametrize("name", EAGER)
def test_bytes_of_eager_peers_are_those_of_their_model(name, setting):
    """Counted from a run, operand by operand; what is of [T] adds less than a tenth of a byte."""
    path, start = opened(name, SMALL, setting)
    sample = RandomInputs(SMALL, CPU).take(0)
    with OperandBytes() as tally:
        start(sample).gradient(sample.g, None)
    assert tally.bytes / SMALL.elements == pytest.approx(path.traffic(1.0), abs=0.1)


def test_a_tally_sees_all_threads_there_are():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with DispatchCounter():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [SMALL, TEMPERED, SMALL._replace(entropy=True)], ids=str)
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_our_paths_are_exact(path, case):
    inputs = RandomInputs(case, CPU)
    sample = inputs.take(0, copy=path.overwrites)
    answer = path.prepare(case, Setting(CPU))(sample)
    gradient = answer.gradient(sample.g, sample.h if case.entropy else None)
    found = measure_errors(inputs.take(0), case, answer, gradient)
    assert set(found) == {"gradient", "logprob", *(["entropy"] if case.entropy else [])}
    assert found["logprob"] < 1e-5
    assert found["gradient"] < 2**-8


@pytest.mark.parametrize("name", EAGER)
def test_peers_are_asked_for_the_same(name, setting):
    _, start = opened(name, SMALL, setting)
    sample = RandomInputs(SMALL, CPU).take(0)
    answer = start(sample)
    found = measure_errors(sample, SMALL, answer, answer.gradient(sample.g, None))
    # F.cross_entropy returns its loss in the logits' own type.
    assert found["logprob"] < (0.1 if name == "torch F.cross_entropy" else 1e-4)
    assert found["gradient"] < 2**-7


def test_errors_see_a_wrong_gradient():
    sample = RandomInputs(TEMPERED, CPU).take(0)
    answer = OURS[0].prepare(TEMPERED, Setting(CPU))(sample)
    gradient = answer.gradient(sample.g, None)
    assert measure_errors(sample, TEMPERED, answer, gradient * 1.1)["gradient"] == pytest.approx(0.1, rel=0.2)
    masked = int((~sample.is_trained[:-1]).nonzero()[0, 0])
    gradient[masked, 5] = 1.0
    assert measure_errors(sample, TEMPERED, answer, gradient)["gradient"] == pytest.approx(1.0)
    gradient[masked, 5] = math.nan
    assert math.isnan(measure_errors(sample, TEMPERED, answer, gradient)["gradient"])


def test_inputs_are_fresh_and_masked():
    inputs = RandomInputs(TEMPERED, CPU)
    first = inputs.take(0).logits.detach().clone()
    sample = inputs.take(0, copy=True)
    assert torch.equal(sample.logits, first)
    with torch.no_grad():
        sample.logits.zero_()
    assert torch.equal(inputs.take(0).logits, first)
    assert int(sample.is_trained.sum()) == 20
    assert torch.equal(sample.is_trained, sample.targets != -100)
    assert not sample.g[~sample.is_trained].any()
    assert not torch.equal(inputs.take(1).logits, first)
    inputs.refresh()
    assert not torch.equal(inputs.take(0).logits, first)


def test_extra_memory_is_beyond_the_gradient():
    given = torch.ones(1 << 24)
    mine = extra_memory(lambda: given * 2, given)
    if mine is None:
        pytest.skip("this system does not let a process reset its peak memory")
    assert abs(mine) < 1 << 20
    assert extra_memory(lambda: (given * 2).exp().mul_(0.5) * 2, given) == pytest.approx(given.nbytes, rel=0.2)
    assert abs(extra_memory(lambda: given.mul_(2), given)) < 1 << 20


def test_interleave_mixes_and_keeps_going():
    order = []

    def candidate(name):
        def run(turn):
            order.append(name)
            if name == "b" and len(order) > 3:
                raise ValueError("gave up\nat length")
            return Lap(1.0, 2.0, 0.5)

        return run

    laps, failures = interleave({name: candidate(name) for name in "abc"}, 2, warmup=1)
    assert sorted(order[:3]) == sorted(order[3:6]) == ["a", "b", "c"]
    assert order[:3] != order[3:6]
    assert failures == {"b": "ValueError: gave up"}
    assert laps == {"a": [Lap(1.0, 2.0, 0.5)] * 2, "c": [Lap(1.0, 2.0, 0.5)] * 2}
    assert laps["a"][0].total == 3.0


def test_spread():
    assert quartiles([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "runs": 3}
    assert quartiles([3.0])["q1"] == 3.0


def test_sweep_varies_one_setting_at_a_time():
    values = {
        "tokens": [4, 8],
        "vocab": [10, 20],
        "tp": [1, 2],
        "fractions": [1.0],
        "entropy": [False, True],
        "temperatures": [1.0, 0.5],
        "dtypes": [torch.bfloat16],
    }
    cases = sweep(**values)
    assert len(cases) == len(set(cases)) == 4 + 1 + 1 + 1
    assert LogprobCase(4, 10, 2, 1.0, True) in cases
    assert LogprobCase(8, 20) not in cases
    assert len(sweep(**values, grid=True)) == 32


def _broken(case, setting):
    def start(sample):
        raise RuntimeError("no kernel image")

    return start


def _missing(case, setting):
    raise Absent("needs a GPU")


def test_absent_and_failing_peers_are_listed():
    paths = [
        OURS[0],
        LogprobPath("broken", _broken, None, "nothing"),
        LogprobPath("missing", _missing, None, "nothing"),
    ]
    result = measure(SMALL, Setting(CPU), paths=paths, repeats=2, seed=0)
    ours, broken, missing = result["paths"]
    assert ours["status"] == "measured"
    assert ours["ms"]["runs"] == 2
    assert ours["collectives"] == 0
    assert (broken["status"], broken["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert (missing["status"], missing["reason"]) == ("absent", "needs a GPU")
    assert ours["of_copy"] == pytest.approx(1.5 * result["copy_ms"]["median"] / ours["ms"]["median"])
    text = result_tables.format_logprobs(result)
    assert "broken: failed: RuntimeError: no kernel image" in text
    assert "missing: absent: needs a GPU" in text
    json.dumps(result)


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_path_can_be_chosen_alone(name):
    assert command.select_paths(name, NAMES) == (name,)


def test_paths_are_chosen_by_name_or_part_of_it():
    assert command.select_paths(None, NAMES) == NAMES
    chosen = command.select_paths("flash, nemo_geomask, unchecked targets,F.cross", NAMES)
    assert chosen == (
        "nemo_geomask, unchecked targets",
        "torch F.cross_entropy",
        "torch F.cross_entropy of logits.float()",
        "flash-attn CE",
    )
    with pytest.raises(ConfigError, match="'flush': no such path; there are: nemo_geomask; nemo_geomask, unchecked"):
        command.select_paths("nemo_geomask,flush", NAMES)
    with pytest.raises(ConfigError, match="''"):
        command.select_paths("nemo_geomask,", NAMES)


def test_incoming_gradient_reaches_entropy_and_logprob():
    leaf = torch.randn(3, 4, requires_grad=True)
    answer = output_by_autograd(leaf, leaf[:, 0] * 2, leaf[:, 1] * 3)
    assert isinstance(answer, PathOutput)
    grad = answer.gradient(torch.ones(3), torch.full((3,), 2.0))
    assert grad.tolist() == [[2.0, 6.0, 0.0, 0.0]] * 3
    answer = output_by_autograd(leaf, leaf[:, 0] * 2)
    assert answer.gradient(torch.ones(3), None)[0].tolist() == [2.0, 0.0, 0.0, 0.0]


def _row(name, ms, **more):
    return {"path": name, "status": "measured", "ms": {"median": ms}, "processor_ms": {"median": ms}, **more}


def test_bars_pass_fail_or_say_why_not():
    case = {**LogprobCase(256, 151_936).describe(), "title": ""}
    names = [bar.peer for bar in speed_targets.TARGETS if bar.device == "cpu"]
    assert len(names) == 3
    rows = [_row(OURS[0].name, 10.0), _row(names[0], 80.0), {"path": names[1], "status": "absent", "reason": "gone"}]
    rows += [_row(names[2], 19.0)]
    found = speed_targets.check_logprobs([{"case": case, "title": "t", "paths": rows}], "cpu")
    assert [bar["passed"] for bar in found] == [True, None, False]
    assert found[1]["reason"].endswith("absent: gone")
    assert [bar["passed"] for bar in speed_targets.check_logprobs([], "cpu")] == [None] * 3
    text = result_tables.format_targets(found)
    assert "pass" in text
    assert "FAIL" in text


def test_gpu_bars_speak_of_large_cases_only():
    def result(tokens, share, **more):
        rows = [_row(path.name, 1.0, of_copy=share, extra_bytes_per_token=20.0) for path in OURS]
        return {"case": LogprobCase(tokens, 151_936, **more).describe(), "title": "t", "paths": rows}

    found = speed_targets.check_logprobs(
        [result(2048, 0.1), result(4096, 0.95), result(8192, 0.8, entropy=True, tp=8)], "cuda"
    )
    share = [bar for bar in found if "of copy" in bar["name"]]
    assert [bar["passed"] for bar in share] == [True, True, False, False]  # checked and unchecked
    extra = [bar for bar in found if "extra bytes" in bar["name"]]
    assert [bar["passed"] for bar in extra] == [True] * 4


def test_check_of_the_targets_may_cost_two_percent_on_a_gpu():
    def verdicts(checked, device="cuda", **more):
        rows = [_row(OURS[0].name, checked, of_copy=0.91), _row(OURS[1].name, 1.0, of_copy=0.92)]
        case = LogprobCase(8192, 151_936, **more).describe()
        found = speed_targets.check_logprobs([{"case": case, "title": "t", "paths": rows}], device)
        return [bar["passed"] for bar in found if f"times as fast as {OURS[1].name}" in bar["name"]]

    assert (verdicts(1.02), verdicts(1.03)) == ([True], [False])
    assert verdicts(1.03, "cpu") == []
    assert verdicts(1.03, fraction=0.2) == [None]  # the target is for batches of which all tokens train


@pytest.mark.parametrize(
    ("how", "ratio", "on_cpu", "on_gpu"),
    [
        ("padded", 0.86, True, False),
        ("padded", 0.69, False, False),
        ("padded, metrics: nemo_rl", 0.99, False, False),
        ("padded, compiled", 2.9, True, False),
        ("padded, compiled", 1.7, False, False),
        ("padded, compiled, metrics: nemo_rl", 2.9, True, False),
        ("padded, compiled, metrics: nemo_rl", 2.2, False, False),
    ],
)
def test_a_cpu_is_held_to_what_was_shown_there(how, ratio, on_cpu, on_gpu):
    ours = {"loss": "gspo", "how": how, "status": "measured", "ms": {"median": 1.0}}
    theirs = {**ours, "how": "NeMo-RL, padded", "ms": {"median": ratio}}
    results = {"on_logprobs": [ours, theirs], "case": LogprobCase(16, 500).describe(), "from_logits": []}
    for device, passed in (("cpu", on_cpu), ("cuda", on_gpu)):
        (bar,) = speed_targets.check_loss(results, device)
        assert bar["passed"] is passed


def test_recorded_cpu_figures_pass_the_targets_of_a_cpu():
    page = File(__file__).parents[3] / "docs" / "performance" / "loss-amd-epyc-2026-11-23.json"
    bars = speed_targets.check_loss(json.loads(page.read_text(encoding="utf-8")), "cpu")
    assert {bar["passed"] for bar in bars} == {True}


@pytest.mark.parametrize(
    ("device", "tokens", "vocab", "verdict"),
    [
        ("cpu", 256, 151_936, False),
        ("cpu", 512, 75_968, False),  # as many logits
        ("cpu", 255, 151_936, None),
        ("cpu", 256, 32_768, None),
        ("cuda", 4095, 151_936, None),
        ("cuda", 4096, 151_936, False),
    ],
)
def test_small_cases_are_not_judged(device, tokens, vocab, verdict):
    entry = {"loss": "gspo", "of_logprobs": 2.0}
    (bar,) = speed_targets.check_loss({"case": LogprobCase(tokens, vocab).describe(), "from_logits": [entry]}, device)
    assert (bar["found"], bar["passed"]) == (2.0, verdict)
    text = result_tables.format_targets([bar])
    assert ("FAIL" in text, "too small to judge" in text) == (verdict is False, verdict is None)


@pytest.mark.slow
def test_volume_of_a_microbatch_is_what_the_documentation_says():
    counted = traffic.count_microbatch_collectives()
    layout, groups = traffic.LAYOUT, counted["groups"]
    tokens, sequences = layout["tokens"] // layout["cp"], layout["sequences"]
    # Nine integers by which the ranks compare what they were called with, and four numbers a token.
    assert groups["tensor-parallel"]["each"] == [["all-gather", 72], ["all-gather", 16 * tokens]]
    compared, statistics, metrics, backward = groups["context-parallel"]["each"]
    assert compared == ["all-gather", 7 * 8]
    assert statistics == ["all-gather", 6 * sequences * 8]
    assert metrics[0] == "all-gather"
    assert metrics[1] < 100 * 8
    assert backward == ["all-gather", sequences * 8]


@pytest.mark.slow
def test_collectives_of_the_paths():
    counted = traffic.count_logprob_collectives([OURS[0].name, "Megatron-core vocab_parallel_cross_entropy"])
    tokens = counted["tokens"]
    ours = counted["paths"][OURS[0].name]
    assert (ours["calls"], ours["payload_bytes"]) == (2, 16 * tokens + 72)
    assert ours["sent_bytes"] == ours["payload_bytes"]  # to the one other rank
    if importlib.util.find_spec("megatron.core"):
        theirs = counted["paths"]["Megatron-core vocab_parallel_cross_entropy"]
        assert (theirs["calls"], theirs["payload_bytes"]) == (3, 3 * tokens * 4)
        assert theirs["sent_bytes"] == 3 * tokens * 4  # 2·(2 - 1)/2 of the payload


@pytest.mark.slow
def test_collectives_without_logits():
    ours, logits = "nemo_geomask linear_logprobs", "nemo_geomask with logits"
    counted = traffic.count_linear_collectives([ours, logits, "torch F.linear, F.cross_entropy"])
    tokens, hidden = counted["tokens"], counted["hidden"]
    assert set(counted["paths"]) == {ours, logits}  # torch's knows of no other rank
    assert (counted["paths"][logits]["calls"], counted["paths"][ours]["calls"]) == (2, 3)
    # The same four numbers a token and nine integers, and the hidden states' gradient in bfloat16.
    statistics = counted["paths"][logits]["payload_bytes"]
    assert statistics == 16 * tokens + 72
    assert counted["paths"][ours]["payload_bytes"] == statistics + 2 * hidden * tokens
    assert "collectives over 2 tensor-parallel ranks" in result_tables.format_collectives(counted)
    assert f"of {hidden} numbers" in result_tables.format_collectives(counted)


@pytest.mark.slow
def test_command_writes_json(tmp_path, capsys):
    options = [
        "--device",
        "cpu",
        "--tokens",
        "8,16",
        "--vocab",
        "500",
        "--repeats",
        "2",
        "--paths",
        "nemo_geomask,F.cross",
    ]
    assert main(["bench", "logprobs", *options, "--entropy", "off,on", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("logprobs-*.json")
    written = json.loads(path.read_text())
    assert len(written["cases"]) == 3
    assert written["machine"]["device"] == "cpu"
    assert "nemo_geomask" in capsys.readouterr().out
    assert main(["bench", "logprobs", *options, "--paths", "nothing"]) == 2
    assert "no such path" in capsys.readouterr().err


def test_command_measures_losses(tmp_path, capsys):
    options = ["--device", "cpu", "--tokens", "16", "--vocab", "500", "--repeats", "1", "--batch", "2,32"]
    assert main(["bench", "loss", *options, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("loss-*.json")
    written = json.loads(path.read_text())
    failed = [row for row in written["on_logprobs"] if row["status"] == "failed"]
    assert not failed
    hows = {"padded", "padded, metrics: nemo_rl", "packed", "NeMo-RL, padded"}
    assert {row["how"] for row in written["on_logprobs"]} == hows
    assert all(row["of_logprobs"] > 0 for row in written["from_logits"])
    assert {bar["passed"] for bar in written["bars"] if "from logits" in bar["name"]} == {None}
    printed = capsys.readouterr().out
    assert "too small to judge: 16 x 500 logits" in printed
    assert "64 packed sequences" in printed


def test_a_loss_is_held_against_nemo_rls():
    def row(how, ms, **others):
        return {"loss": "gspo", "how": how, "status": "measured", "ms": {"median": ms}, **others}

    rows = [row("padded", 1.1), row("padded, metrics: nemo_rl", 1.1), row("padded, compiled", 0.3), row("packed", 9.0)]
    ways = [{"way": f"{whose}, one by one", **row("", ms)} for whose, ms in (("NeMo-RL", 99.0), ("ours", 10.0))]
    results = {
        "on_logprobs": [*rows, row("NeMo-RL, padded", 1.0, processor_ms={"median": 1.0})],
        "skewed": {"ways": ways},
        "case": LogprobCase(16, 500).describe(),
        "from_logits": [],
    }
    found = speed_targets.check_loss(results, "cpu")
    assert [(bar["found"], bar["passed"]) for bar in found] == [
        (pytest.approx(1 / 1.1), True),
        (pytest.approx(1 / 1.1), False),
        (pytest.approx(1 / 0.3), True),
        (pytest.approx(9.9), False),
    ]
    results["on_logprobs"][-1] = {"loss": "gspo", "how": "NeMo-RL, padded", "status": "absent", "reason": "no such"}
    results["skewed"] = {"ways": [{"way": "all", "status": "absent", "reason": "no such"}]}
    assert [bar["passed"] for bar in speed_targets.check_loss(results, "cpu")] == [None, None, None]


def test_page_shows_what_was_measured():
    page = File(__file__).parents[3] / "docs" / "background" / "performance.md"
    text = page.read_text(encoding="utf-8")
    assert performance_page.rewrite(text, page.parents[1] / "performance") == text, "run: make docs"
    with pytest.raises(ArgumentError, match="logprobs: begin"):
        performance_page.rewrite("nothing", page.parents[1] / "performance")


def test_kernels_are_those_that_there_are():
    assert bench_arguments.KERNELS == KERNELS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "'0' is not a whole number above 0"),
        (["--fractions", "1.5"], "'1.5' is not a fraction above 0 and up to 1"),
        (["--entropy", "maybe"], "'maybe' is neither off nor on"),
        (["--dtypes", "int8"], "'int8' is none of bfloat16"),
    ],
)
def test_bad_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss", "--grid"], "--grid is for bench logprobs; bench loss does not read it"),
        (["segments", "--grid"], "--grid is for bench logprobs; bench segments does not"),
        (["logprobs", "--batch", "2,32"], "--batch is for bench loss; bench logprobs does not"),
        (["linear", "--temperatures", "0.7"], "--temperatures is for bench logprobs and loss; bench linear does not"),
        (
            ["segments", "--tokens", "5"],
            "--tokens is for bench logprobs and linear and loss and step; bench segments does",
        ),
        (["segments", "--seed", "0"], "--seed is for bench logprobs and linear and loss and step; bench segments does"),
        (
            ["scale", "r.yaml", "--vocab", "5"],
            "--vocab is for bench logprobs and linear and loss and step; bench scale",
        ),
        (["scale", "r.yaml", "--fractions", "1,0.5"], "--fractions: bench scale takes one value, not 2"),
        (["loss", "--tokens", "5,6"], "--tokens: bench loss takes one value, not 2"),
    ],
)
def test_options_of_another_benchmark_are_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


@pytest.mark.parametrize(("benchmark", "vocab"), [("logprobs", "7"), ("linear", "16,9")])
def test_a_vocabulary_that_is_not_whole_shards_is_named(benchmark, vocab, capsys):
    assert main(["bench", benchmark, "--device", "cpu", "--tokens", "4", "--vocab", vocab, "--tp", "8"]) == 2
    assert (
        f"--vocab {vocab[-1]} can't be divided into --tp 8 equal shards; use a multiple of 8" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["loss", "step"])
def test_runs_without_pydantic(benchmark):
    code = f"""
        import runpy, sys
        sys.modules["pydantic"] = None
        sys.argv = ["bench", "{benchmark}", "--device", "cpu"]
        runpy.run_module("nemo_geomask.tools.bench", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert f"{benchmark}: absent: pydantic can't be imported" in done.stdout
