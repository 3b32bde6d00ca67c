"""``nemo-geomask check`` with a NeMo-RL whose loss has fields that no loss of this package knows."""

from __future__ import annotations

import json
import shutil

import pytest

from nemo_geomask.cli import main
from nemo_geomask.recipe import ROOT_VARIABLE, nemo_rl_root
from tests.helpers.nemo_rl import fake_tree

pytest.importorskip("omegaconf", reason="reading a recipe needs omegaconf")

LOSS = "nemo_rl/algorithms/loss/loss_functions.py"


@pytest.fixture(params=["fake", "real"])
def checkout(request, tmp_path, monkeypatch):
    """A checkout to which NeMo-RL's pull requests 3751 and 3256 were applied, as far as their fields go."""
    root = tmp_path / "RL"
    if request.param == "real":
        if nemo_rl_root() is None:
            pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
        (root / LOSS).parent.mkdir(parents=True)
        shutil.copy(nemo_rl_root() / LOSS, root / LOSS)
    else:
        root.mkdir()
        fake_tree.write(root)
    text = (root / LOSS).read_text(encoding="utf-8")
    before = "    token_level_loss: bool"
    assert before in text
    is_dict = "ClippedPGLossConfig(TypedDict)" in text
    field = "    overlong_penalty: float\n" if is_dict else "    overlong_penalty: float = 0.0\n"
    (root / LOSS).write_text(text.replace(before, field + before, 1), encoding="utf-8")
    configs = root / "examples" / "configs"
    configs.mkdir(parents=True)
    (configs / "grpo_math_1B.yaml").write_text("loss_fn: {overlong_penalty: 0.0}\ngrpo: {}\n", encoding="utf-8")
    monkeypatch.setenv(ROOT_VARIABLE, str(root))
    return root


@pytest.fixture
def check(checkout, tmp_path, capsys):
    def check(block, *overrides):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"defaults: {checkout}/examples/configs/grpo_math_1B.yaml\nloss_fn: {block}\n")
        main(["check", str(recipe), *overrides, "--format", "json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        return {(each["rule"], each["key"]): each["message"] for each in findings}

    return check


def test_the_default_is_valid(check):
    assert not [rule for rule, _ in check("{name: gspo}") if rule == "GM001"]


def test_another_value_is_an_error_and_its_way_out_works(check):
    found = check("{name: gspo, overlong_penalty: 0.5, ratio_clip_minn: 0.1}")
    assert "delete it with ~loss_fn.overlong_penalty" in found["GM001", "loss_fn.overlong_penalty"]
    assert "did you mean 'ratio_clip_min'?" in found["GM001", "loss_fn.ratio_clip_minn"]
    assert ("GM001", "loss_fn.overlong_penalty") not in check(
        "{name: gspo, overlong_penalty: 0.5}", "~loss_fn.overlong_penalty"
    )


def test_under_nemo_rls_own_loss_it_is_a_doubt(check):
    assert not [rule for rule, _ in check("{ratio_clip_min: 0.1}") if rule in ("GM001", "GM002")]
    found = check("{overlong_penalty: 0.5}")
    assert "overlong_penalty: NeMo-RL's own loss reads it" in found["GM002", "loss_fn"]


def test_without_a_checkout_the_key_is_unknown(check, monkeypatch, tmp_path):
    (tmp_path / "RL" / LOSS).unlink()
    assert "unknown key" in check("{name: gspo}")["GM001", "loss_fn.overlong_penalty"]
