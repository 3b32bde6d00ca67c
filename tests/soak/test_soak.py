"""The soak in short: every scenario does what it says, and each check fails where something is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.soak.__main__ import SIZES, main, run
from tests.soak.outcome import Outcome

pytest.importorskip("pyarrow", reason="records are Parquet (diagnose extra)")


def test_eager_calls_agree_with_the_oracle(capsys):
    assert main(["--only", "eager", "--eager", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("loss calls, eager: 40 done, ")
    assert " 0 checked" not in out


def test_a_wrong_answer_is_found():
    from tests.helpers.batches import Result
    from tests.soak.loss_calls import difference

    result = Result(torch.tensor(1.0), torch.tensor([[1.0]]), {"kl_penalty": 2.0})
    assert difference(result, 1.0, torch.tensor([[1.0]]), {"kl_penalty": 2.0}) == ""
    assert difference(result, 1.001, torch.tensor([[1.0]]), {"kl_penalty": 2.0}).startswith("loss 1.0, not 1.001")
    assert difference(result, 1.0, torch.tensor([[1.001]]), {"kl_penalty": 2.0}) == "gradient"
    assert difference(result, 1.0, torch.tensor([[1.0]]), {"kl_penalty": 2.002}).startswith("metric kl_penalty")


def test_steps_are_recorded_and_read(tmp_path):
    from tests.soak.recording import file_difference, paths_by_step, record_steps

    outcome = record_steps(6, tmp_path, check_every=1)
    assert (outcome.done, outcome.checked, outcome.failures()) == (6, 6, [])
    paths = paths_by_step(tmp_path)
    assert "has other sequences" in file_difference(paths[1], 2)
    paths[3].write_bytes(paths[3].read_bytes()[:-20])
    assert "can't be read" in file_difference(paths[3], 3)


def test_memory_beyond_the_limit_is_a_failure():
    assert Outcome("calls", 1, growth_mib=63.0).failures() == []
    grown = Outcome("calls", 1, growth_mib=65.0)
    assert grown.failures() == ["memory grew by 65 MiB, more than 64"]
    assert "1 PROBLEMS" in grown.line()


@pytest.mark.slow
def test_a_recorder_is_killed(capsys):
    (outcome,) = run({"recorder-kills": 2})
    assert (outcome.done, outcome.failures()) == (2, [])
    assert outcome.checked >= 2


@pytest.mark.slow
def test_a_fault_of_a_rank_is_judged():
    from tests.soak.rank_faults import FAULTS, try_faults

    assert len(FAULTS) == SIZES["faults"] == len({fault.name for fault in FAULTS})
    outcome = try_faults(("killed", "has a NaN"), timeout=120.0)
    assert (outcome.done, outcome.failures()) == (2, [])
