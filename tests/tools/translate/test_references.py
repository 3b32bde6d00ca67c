"""References between settings, as OmegaConf resolves them."""

import pytest
from omegaconf import OmegaConf

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import translate, translate_files
from nemo_geomask.tools.translate.references import resolve_references
from nemo_geomask.tools.translate.setting_values import flat

CONFIGS = [
    "a: {b: 2}\nc: ${a.b}",
    "c: ${oc.select:a.b,3}",
    "a: {b: 2}\nc: ${oc.select:a.b,3}",
    "a: {b: null}\nc: ${oc.select:a.b,3}",
    "a: {b: '???'}\nc: ${oc.select:a.b,3}",
    "c: ${oc.select:a.b, 3e-4}",
    "c: ${oc.select:a.b,token-mean}",
    "c: ${oc.select:a.b,'x, y'}",
    "c: ${oc.select:a.b,null}",
    "c: ${oc.select:a.b,false}",
    "c: ${oc.select:a.b,[1, 2]}",
    "d: {e: 7}\nc: ${oc.select:a.b,${d.e}}",
    "d: {e: 7}\nc: ${oc.select:a.b,${oc.select:a.c,${d.e}}}",
    "x: {y: 5, c: '${.y}', z: {c: '${..y}', d: '${oc.select:..w,1}'}}",
    "a: {b: '${d}'}\nd: '${e}'\ne: '${f}'\nf: 9\nc: ${a.b}",
]


@pytest.mark.parametrize("text", CONFIGS)
def test_references_have_the_values_of_omegaconf(text):
    config = OmegaConf.create(text)
    expected = flat(OmegaConf.to_container(config, resolve=True))
    settings, _ = resolve_references(flat(OmegaConf.to_container(config, resolve=False)), {}, lambda key: None)
    assert settings == expected


@pytest.mark.parametrize(
    "value",
    [
        "${a.b}",
        "${oc.select:a.b}",
        "${oc.select:a.b,1}${d}",
        "${oc.select:d,1}${d}",
        "${d}${d}",
        "${oc.env:NAME,1}",
        "${oc.select:section,1}",
        "${c}",
        "${oc.select:c,1}",
    ],
)
def test_what_the_file_does_not_determine_stays_a_reference(value):
    settings = {"c": value, "d": 2, "section.e": 3}
    assert resolve_references(settings, {}, lambda key: None) == (settings, {})


ACTOR = "actor_rollout_ref.actor."


def test_a_default_of_oc_select_is_used_and_named():
    translation = translate({ACTOR + "clip_ratio_high": "${oc.select:my.clip,0.28}"}, "verl")
    assert translation.loss_fn["ratio_clip_max"] == 0.28
    assert translation.from_defaults["my.clip"] == 0.28
    assert "my.clip: 0.28" in translation.yaml()
    translation = translate({ACTOR + "clip_ratio_high": "${oc.select:my.clip,0.28}", "my.clip": 0.3}, "verl")
    assert translation.loss_fn["ratio_clip_max"] == 0.3


def test_the_systems_default_comes_before_that_of_oc_select():
    settings = {ACTOR + "clip_ratio_high": f"${{oc.select:{ACTOR}clip_ratio,0.9}}"}
    assert translate(settings, "verl").loss_fn["ratio_clip_max"] == 0.2
    base = {ACTOR + "clip_ratio": 0.1}
    assert translate(settings, "verl", base).loss_fn["ratio_clip_max"] == 0.1


def test_a_reference_has_the_value_of_the_last_file(tmp_path):
    base, run = tmp_path / "base.yaml", tmp_path / "run.sh"
    base.write_text("actor_rollout_ref: {actor: {clip_ratio_low: 0.1, clip_ratio_high: '${..actor.clip_ratio_low}'}}")
    run.write_text("python -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio_low=0.3")
    assert translate_files([base]).loss_fn["ratio_clip_max"] == 0.1
    assert translate_files([base, run]).loss_fn["ratio_clip_max"] == 0.3


def test_a_later_file_wins_under_any_form_of_a_name(tmp_path):
    paths = [tmp_path / f"{number}.yaml" for number in range(3)]
    for path, name, value in zip(
        paths, ("clip_ratio_low", ACTOR + "clip_ratio_low", "clip_ratio_low"), (1, 2, 3), strict=True
    ):
        path.write_text(f"{name}: 0.{value}")
    for count in (1, 2, 3):
        assert translate_files(paths[:count], "verl").loss_fn["ratio_clip_min"] == count / 10


def test_a_variable_of_the_shell_is_no_reference(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("trl grpo --epsilon 0.1 --epsilon_high ${epsilon}")
    with pytest.raises(ConfigError, match=r"epsilon_high.*\$epsilon"):
        translate_files([file], "trl")
