"""The report on trained runs: which variant is the baseline."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib", reason="the lab draws a plot (demo extra)")
pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_report import report_results
from nemo_geomask.tools.lab.run_store import Run, write_steps

FACTS = {"chance": 0.2, "sampler": "copy", "precision": "float32"}
NONE = {"corrected": False, "loss_fn": {"masks": [], "batch_veto": None}}
TOKEN = {"corrected": True, "loss_fn": {"masks": []}}
MASKED = {"corrected": False, "loss_fn": {"masks": [{"preset": "opsm"}]}}
VETOED = {"corrected": False, "loss_fn": {"batch_veto": {"max": 0.1}}}


@pytest.fixture
def report(tiny, tmp_path, capsys):
    """Write runs of 2 steps, each (label, reward, facts), on the seeds 1 and 2; report on them."""

    def build(*variants, seeds=(1, 2), **options):
        for position, (label, reward, facts) in enumerate(variants):
            for seed in seeds:
                recipe = tiny(grpo={"seed": seed}, policy={"lr": facts.get("lr", 1e-3)})
                history = [{"reward": reward + seed / 100, "step_seconds": 1.0}] * 2
                write_steps(Run(label, recipe, tmp_path, position), history, {**FACTS, **facts})
        report_results([tmp_path], tmp_path, **options)
        return json.loads((tmp_path / "summary.json").read_text()), capsys.readouterr().out

    return build


def test_the_uncorrected_variant_is_the_baseline_wherever_it_stands(report):
    summary, printed = report(
        ("a:token", 0.5, TOKEN),
        ("b:none+opsm", 0.4, MASKED),
        ("b:none veto", 0.4, VETOED),
        ("z:none", 0.3, NONE),
        ("c:none lr=1", 0.5, NONE),  # of several uncorrected ones, that without settings
    )
    assert summary["baseline"] == "z:none"
    assert "baseline z:none" in printed
    differences = {row["variant"]: row["difference"] for row in summary["variants"]}
    assert differences == {
        "z:none": None,
        "a:token": pytest.approx(0.2),
        "b:none+opsm": pytest.approx(0.1),
        "b:none veto": pytest.approx(0.1),
        "c:none lr=1": pytest.approx(0.2),
    }


def test_the_first_variant_of_the_comparison_is_the_baseline_if_all_are_corrected(report):
    summary, _ = report(("z:token", 0.5, TOKEN), ("a:sequence", 0.4, TOKEN))
    assert [summary["baseline"], *(row["variant"] for row in summary["variants"])] == [
        "z:token",
        "z:token",
        "a:sequence",
    ]


def test_another_baseline_is_taken_by_its_label(report):
    summary, _ = report(("a:token", 0.5, TOKEN), ("z:none", 0.3, NONE), baseline="a:token")
    assert summary["baseline"] == "a:token"
    with pytest.raises(ConfigError, match="no run of 'b' here; there are a:token, z:none"):
        report(("a:token", 0.5, TOKEN), ("z:none", 0.3, NONE), baseline="b")
