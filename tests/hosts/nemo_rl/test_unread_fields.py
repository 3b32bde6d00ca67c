"""Fields that the installed NeMo-RL's own loss has and no loss of this package knows."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
from pydantic import BaseModel, Field

import nemo_geomask
from nemo_geomask.cli import main
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import facts, with_geomask
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.recipe import nemo_rl_root

# As pull requests 3751 and 3256 of NeMo-RL do, and a few more kinds of default.
NEW = {
    "metrics_level": ("str = 'full'", "full", "minimal", "metrics_level, write metrics: full, or for minimal"),
    "overlong_penalty": ("float = 0.0", 0, 0.5, "overlong_penalty, or set 0.0, which changes nothing"),
    "clip_schedule": ("list = Field(default_factory=list)", [], [0.2, 0.3], "clip_schedule, or set"),
    "entropy": ("dict = Field(default={'coef': 0.0})", {"coef": 0.0}, {"coef": 0.1}, "entropy, or set {coef: 0.0}"),
}
EVERY = ["name: gspo", *(f"{key}: {neutral!r}" for key, (_, neutral, _, _) in NEW.items())]


@pytest.fixture
def newer(host, tmp_path):
    """A NeMo-RL whose loss has fields that are not ours."""

    def make(**how):
        path = host(**how) and tmp_path / "nemo_rl" / "algorithms" / "loss" / "loss_functions.py"
        text = path.read_text(encoding="utf-8")
        before = "    token_level_loss: bool"
        fields = "".join(f"    {key}: {NEW[key][0] if how.get('pydantic', True) else 'float'}\n" for key in NEW)
        path.write_text("from pydantic import Field\n" + text.replace(before, fields + before, 1), encoding="utf-8")
        for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
            del sys.modules[name]
        return importlib.import_module("nemo_rl.algorithms.loss.loss_functions")

    return make


def build(loss, **settings):
    return run_setup(loss.ClippedPGLossConfig(**settings))


def run_setup(loss_config):
    """The loss that ``setup`` returns."""
    algorithm = importlib.import_module("nemo_rl.algorithms.grpo")
    return with_geomask(algorithm.setup)(algorithm.MasterConfig(loss_config))[2]


def test_a_value_that_changes_nothing_is_accepted_and_logged(newer, caplog):
    loss = newer()
    caplog.set_level(logging.INFO, logger="nemo_geomask")
    ours = build(loss, name="gspo", ratio_clip_min=0.1, **{key: neutral for key, (_, neutral, *_) in NEW.items()})
    assert isinstance(ours, PolicyLoss)
    assert ours.config == nemo_geomask.build_loss({"name": "gspo", "ratio_clip_min": 0.1}).config
    (line,) = [line for line in caplog.messages if "only NeMo-RL's own loss reads" in line]
    assert all(f"'{key}'" in line for key in NEW)


@pytest.mark.parametrize("key", NEW)
def test_any_other_value_is_refused_with_the_way_out(newer, key):
    loss = newer()
    _, _, value, hint = NEW[key]
    with pytest.raises(ConfigError) as caught:
        build(loss, name="gspo", **{key: value})
    (problem,) = caught.value.problems
    assert problem.keys == (f"loss_fn.{key}",)
    assert "NeMo-RL's own loss reads it (found " in problem.message
    assert f"delete it with ~loss_fn.{hint}" in problem.message
    # NeMo-RL's own loss has it as it is.
    assert type(build(loss, **{key: value})) is loss.ClippedPGLossFn
    with pytest.raises(ConfigError) as caught:
        build(loss, name="gspo", **{key: value for key, (_, _, value, _) in NEW.items()})
    assert [problem.keys for problem in caught.value.problems] == [(f"loss_fn.{key}",) for key in NEW]


def test_in_a_dict_null_false_and_zero_change_nothing(newer):
    newer(pydantic=False)
    settings = {"name": "gspo", "metrics_level": None, "overlong_penalty": 0.0, "entropy": False}
    assert isinstance(run_setup(settings), PolicyLoss)
    with pytest.raises(ConfigError, match="loss_fn.overlong_penalty: .*found 0.1.*, or set null"):
        run_setup({**settings, "overlong_penalty": 0.1})


def test_a_misspelt_key_is_still_an_error(newer):
    loss = newer()
    for key in ("metric_level", "ratio_clip_minn", "overlong_penalti"):
        with pytest.raises(ConfigError, match=f"loss_fn.{key}: unknown key"):
            build(loss, name="gspo", **{key: 0.0})


def test_a_run_ends_before_the_script(newer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("omegaconf", reason="reading a recipe needs omegaconf")
    newer()
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "train.py"
    main_block = "if __name__ == '__main__':\n    raise SystemExit('started')\n"
    script.write_text(f"from nemo_rl.algorithms.grpo import setup\n{main_block}", encoding="utf-8")
    recipe.write_text("loss_fn: {name: gspo, overlong_penalty: 0.5}\n", encoding="utf-8")
    assert main(["run", str(script), "--config", str(recipe)]) == 2
    assert "delete it with ~loss_fn.overlong_penalty" in capsys.readouterr().err
    recipe.write_text("loss_fn: {" + ", ".join(EVERY) + "}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="started"):
        main(["run", str(script), "--config", str(recipe)])


def test_source_and_class_have_the_same_defaults(newer, tmp_path):
    loss = newer()
    neutral = facts.neutral_values(loss.ClippedPGLossConfig)
    assert neutral == facts.neutral_values_in_source(tmp_path)
    assert {key: neutral[key] for key in NEW} == {key: (default,) for key, (_, default, *_) in NEW.items()}


class Inner(BaseModel):
    coef: float = 0.0


def test_defaults_of_other_kinds(tmp_path):
    text = """
        from pydantic import BaseModel, Field
        from nemo_rl.elsewhere import DEFAULT, Inner
        class Base(BaseModel, extra="allow"):
            inherited: float = 1.5
        class ClippedPGLossConfig(Base):
            required: float
            marked: float = Field(...)
            computed: float = DEFAULT
            made: Inner = Field(default_factory=Inner)
            negative: float = -1.0
            described: float | None = Field(None, ge=0)
    """
    path = tmp_path / "nemo_rl" / "algorithms" / "loss" / "loss_functions.py"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(line[8:] for line in text.splitlines()), encoding="utf-8")
    expected = {"inherited": (1.5,), "required": (), "marked": (), "computed": (), "made": ()}
    assert facts.neutral_values_in_source(tmp_path) == {**expected, "negative": (-1.0,), "described": (None,)}
    assert facts.neutral_values_in_source(tmp_path / "nowhere") == {}

    class Config(BaseModel):
        required: float
        made: Inner = Field(default_factory=Inner)

    assert facts.neutral_values(Config) == {"required": (), "made": ({"coef": 0.0},)}


@pytest.mark.skipif(nemo_rl_root() is None, reason="needs a NeMo-RL checkout: NEMO_RL_ROOT")
def test_every_field_of_a_real_nemo_rl_is_ours_too():
    fields = facts.neutral_values_in_source(nemo_rl_root())
    assert len(fields) >= 17
    assert fields.keys() <= LossConfig.model_fields.keys()
