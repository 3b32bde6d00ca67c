"""``bench linear``: every path without logits that runs here is held to float64, and the bars to what was measured."""

import json

import pytest
import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.bench import command, linear_bench, result_tables, speed_targets
from nemo_geomask.tools.bench.linear_cases import LinearCase
from nemo_geomask.tools.bench.paths import Setting, linear_paths

CASES = [
    LinearCase(64, 16, 500, dtype=torch.float32, entropy=True),
    LinearCase(64, 16, 500, tp=2, fraction=0.2, dtype=torch.float32),
]


def test_paths_agree_with_float64():
    found = linear_bench.benchmark(CASES, Setting(torch.device("cpu")), repeats=1)
    json.dumps(found)
    for result in found:
        rows = {row["path"]: row for row in result["paths"]}
        assert rows["cut-cross-entropy"]["status"] in ("absent", "not applicable")
        measured = [row for row in rows.values() if row["status"] == "measured"]
        assert {"nemo_geomask linear_logprobs", "nemo_geomask with logits"} <= {row["path"] for row in measured}
        for row in measured:
            assert row["errors"]["logprob"] < 1e-5, row["path"]
            assert row["errors"]["gradient"] < 1e-5, row["path"]
        assert "with entropy" in result_tables.format_linear(
            result
        ) or "0.2 of the tokens" in result_tables.format_linear(result)
    names = [bar["name"] for bar in speed_targets.check_linear(found, "cpu")]
    assert sum("extra memory" in name for name in names) == 2
    assert sum("times as fast as with logits" in name for name in names) == 1


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        ("", ["T=8, H=4, V=151936, bfloat16"]),
        (
            "--vocab 50,60 --tp 2 --entropy on --fractions 0.5,1",
            [
                "T=8, H=4, V=50/2, bfloat16, 0.5 of the tokens train, with entropy",
                "T=8, H=4, V=50/2, bfloat16, with entropy",
                "T=8, H=4, V=60/2, bfloat16, 0.5 of the tokens train, with entropy",
            ],
        ),
    ],
)
def test_what_is_asked_is_measured(words, cases, monkeypatch):
    from nemo_geomask.cli import main

    seen = []

    def benchmark(cases, setting, **how):
        seen.extend(map(str, cases))
        raise KeyboardInterrupt

    monkeypatch.setattr(linear_bench, "benchmark", benchmark)
    options = ["--device", "cpu", "--tokens", "8", "--hidden", "4", *words.split()]
    assert main(["bench", "linear", *options]) == 130
    assert seen == cases


@pytest.mark.slow
def test_options_of_the_command(capsys, tmp_path):
    arguments = [
        "bench",
        "linear",
        "--device",
        "cpu",
        "--tokens",
        "16",
        "--hidden",
        "4",
        "--vocab",
        "50",
        "--repeats",
        "1",
        "--paths",
        "with",
        "--out",
    ]
    from nemo_geomask.cli import main

    assert main([*arguments, str(tmp_path)]) == 0
    (path,) = tmp_path.glob("linear-*.json")
    result = json.loads(path.read_text())
    assert [row["path"] for row in result["cases"][0]["paths"]] == ["nemo_geomask with logits"]
    assert "T=16, H=4, V=50" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="'none': no such path; there are: nemo_geomask linear_logprobs"):
        command.select_paths("none", tuple(linear_paths.PATHS))
