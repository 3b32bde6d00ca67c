"""Shell scripts: a setting has the value that bash gives it, or the answer says that it is not known."""

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import translate_files

RUN = "python3 -m verl.trainer.main_ppo"
LOW, HIGH = "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"

# Scripts, each with what bash passes as low and high; 0.2 is verl's default. L, H and RUN stand for the names above.
FOLLOWED = [
    ("X=0.1; ! X=0.4; RUN L=$X", 0.4, 0.2),
    ("E='0.1 H=0.4'; RUN L=$E", 0.1, 0.4),
    ('A=(L=0.1); B=("${A[@]}"); A=(); RUN "${B[@]}"', 0.1, 0.2),
    ('c="RUN L=0.1"; c+=" H=0.4"; $c', 0.1, 0.4),
    ("for i in 1 2; do X=0.4; RUN L=$X; done", 0.4, 0.2),
    ("read -r Y <<< 9\nRUN L=0.4", 0.4, 0.2),
]

# As above, for what no reader follows.
NOT_FOLLOWED = [
    ("X=0.1; f() { X=0.4; }; RUN L=$X", 0.1, 0.2),
    ("X=0.1; if a; then function f { X=0.4; }; fi; X=0.2; f; RUN L=$X", 0.4, 0.2),
    ("X=0.1; for i in 1 2; do RUN L=$X; X=0.4; done", 0.4, 0.2),
    ("X=0.1; (f() { X=0.4; }; f); RUN L=$X", 0.1, 0.2),
    ("X=0.1; Y='X=0.4'; eval $Y; RUN L=$X", 0.4, 0.2),
    ('main() { RUN L=0.4 "$@"; }; main "$@"', 0.4, 0.2),
    ('X=0.1; Y="export X=0.4"; $Y; RUN L=$X', 0.4, 0.2),
    ("X=0.1; . <(echo X=0.4); RUN L=$X", 0.4, 0.2),
    ('A=(L=0.1); A[${#A[@]}]=H=0.4; RUN "${A[@]}"', 0.1, 0.4),
    ('A=(L=0.1); f() { local -n r=$1; r+=("$2"); }; f A H=0.4; RUN "${A[@]}"', 0.1, 0.4),
    ("f() if true; then X=0.4; fi\nX=0.1\nf\nRUN L=$X", 0.4, 0.2),
    ("X=0.1; f() { RUN L=$X; }; X=0.3 f", 0.3, 0.2),
    ('f() { RUN "$@"; }; f L=0.4', 0.4, 0.2),
    ('w() { python3 "$@" H=0.3; }; w -m verl.trainer.main_ppo L=0.4', 0.4, 0.3),
    ('set -- L=0.1; RUN "$@"', 0.1, 0.2),
    ("X=0.1; X=0.4 | cat; RUN L=$X", 0.1, 0.2),
    ("X=0.1; { X=0.4; } | cat; RUN L=$X", 0.1, 0.2),
    ("X=0.1; printf -v X 0.4; RUN L=$X", 0.4, 0.2),
    ("X=0.1; while read -r X; do :; done <<< 0.4; RUN L=$X", "", 0.2),
    ("X=0.1; for X in 0.2 0.3; do :; done; RUN L=$X", 0.3, 0.2),
    ("C=1; D=$((C+=4)); RUN L=0.$C", 0.5, 0.2),
    ("A=(L=0.1 H=0.4); unset 'A[1]'; RUN \"${A[@]}\"", 0.1, 0.2),
    ("A=$X; X=0.4; RUN H=0.3 L=$A", "", 0.3),
]


def translated(script, folder):
    file = folder / "run.sh"
    file.write_text(script.replace("RUN", RUN).replace("L=", f"{LOW}=").replace("H=", f"{HIGH}="))
    return translate_files([file], "verl")


@pytest.mark.parametrize(("script", "low", "high"), FOLLOWED)
def test_what_is_followed_has_bashs_value(script, low, high, tmp_path):
    translation = translated(script, tmp_path)
    assert translation.not_expressed == ()
    assert (translation.loss_fn["ratio_clip_min"], translation.loss_fn["ratio_clip_max"]) == (low, high)


@pytest.mark.parametrize(("script", "low", "high"), NOT_FOLLOWED)
def test_what_is_not_followed_has_bashs_value_or_is_not_expressed(script, low, high, tmp_path):
    try:
        translation = translated(script, tmp_path)
    except ConfigError:
        return
    values = translation.loss_fn["ratio_clip_min"], translation.loss_fn["ratio_clip_max"]
    assert translation.not_expressed or values == (low, high)


def test_quotes_of_a_variables_value_are_characters(tmp_path):
    # Hydra takes 1_5 for the number 15, so verl's scripts put quotes around it that the shell keeps.
    text = r"T=1_5; RUN algorithm.rollout_correction.rollout_is=token TH=\'${T}\'"
    name = "algorithm.rollout_correction.rollout_is_threshold"
    loss = translated(text.replace("TH=", f"{name}="), tmp_path).loss_fn
    assert loss["truncated_importance_sampling_ratio_min"] == 1
    assert loss["truncated_importance_sampling_ratio"] == 5


@pytest.mark.parametrize("wrapper", ["export X=0.4; bash own.sh", "X=0.4 sbatch -N 2 own.sh", "./own.sh H=0.4"])
def test_a_script_that_runs_another_one_may_set_it(wrapper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, script in {"own.sh": 'RUN L=${X:-0.1} "$@"', "wrapper.sh": wrapper}.items():
        (tmp_path / name).write_text(script.replace("RUN", RUN).replace("L=", f"{LOW}=").replace("H=", f"{HIGH}="))
    both = translate_files([tmp_path / "own.sh", tmp_path / "wrapper.sh"])
    assert any("wrapper.sh runs own.sh" in text for text in both.not_expressed)
    if "H=" in wrapper:
        alone = translate_files([tmp_path / "wrapper.sh"])
        assert any("own.sh: a script" in text for text in alone.not_expressed)
    else:
        with pytest.raises(ConfigError, match="own.sh, which is run here"):
            translate_files([tmp_path / "wrapper.sh"])
