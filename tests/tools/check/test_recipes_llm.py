"""The recipes for NeMo-RL: their losses build anywhere; where NeMo-RL is importable, it reads them as we do."""

import importlib
import itertools
import re
import sys
import typing
from pathlib import Path

import pytest
import yaml

from nemo_geomask import build_loss
from nemo_geomask.hosts.nemo_rl.facts import reads_setting
from nemo_geomask.recipe import load_recipe, nemo_rl_root, read_recipe
from nemo_geomask.tools.check import RecipeFacts, check

FOLDER = Path(__file__).parents[3] / "recipes" / "llm"
RECIPES = sorted(FOLDER.glob("*.yaml"))
STUDY = {
    level: FOLDER / f"grpo-gspo-deepscaler-1.5b-8K-is-{level}.yaml"
    for level in ("none", "token", "sequence", "sequence_mean")
}
ROUTER_REPLAY = "policy.router_replay.enabled"

# NeMo-RL's base recipes spell out every default; v0.6.0's also has a truncation without a ratio.
BASE_LOSS = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
}


def comments(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(itertools.takewhile(lambda line: line.startswith("#"), lines))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A checkout whose base recipes hold NeMo-RL's loss_fn and nothing else."""
    for path in RECIPES:
        for base in re.findall(r"^defaults: \S*\}/(examples/configs/\S+)$", path.read_text(encoding="utf-8"), re.M):
            file = tmp_path / base
            file.parent.mkdir(parents=True, exist_ok=True)
            gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False} if "-gspo-" in base else {}
            file.write_text(yaml.safe_dump({"loss_fn": {**BASE_LOSS, **gspo}}), encoding="utf-8")
    monkeypatch.setenv("NEMO_RL_ROOT", str(tmp_path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("stand_in")
def test_loss_builds_without_a_doubt(path):
    # A UserWarning of the package's is an error, see pyproject.toml.
    assert build_loss(load_recipe(path)["loss_fn"]).config.name in ("gspo", "clipped_pg")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("stand_in")
def test_names_are_the_files(path):
    recipe = load_recipe(path)
    assert recipe["logger"]["log_dir"] == f"logs/{path.stem}"
    assert recipe["logger"].get("wandb", {"name": path.stem})["name"] == path.stem
    assert recipe["checkpointing"].get("checkpoint_dir", f"results/{path.stem}") == f"results/{path.stem}"
    assert path.stem.startswith("grpo-")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("stand_in")
def test_a_comment_says_what_it_is_for_and_what_it_needs(path):
    modeline, *rest = comments(path)
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", modeline)[1]
    assert (path.parent / schema).exists()
    assert rest
    text = " ".join(rest)
    inherits = any(other.name in path.read_text(encoding="utf-8") for other in RECIPES)
    assert "NeMo-RL v0." in text or inherits
    if load_recipe(path).get("policy", {}).get("router_replay", {}).get("enabled"):
        assert "v0.7.0 or newer; v0.6.0 does not read" in text.replace("# ", "")


@pytest.mark.usefixtures("stand_in")
def test_the_study_varies_the_level_and_nothing_else():
    blocks = {}
    for level, path in STUDY.items():
        recipe = load_recipe(path)
        for section in ("logger", "checkpointing"):
            del recipe[section]
        loss = build_loss(recipe["loss_fn"]).config
        assert loss.use_importance_sampling_correction == (level != "none")
        assert level in ("none", loss.correction_level)
        for key in ("use_importance_sampling_correction", "is_correction_level"):
            del recipe["loss_fn"][key]
        blocks[level] = recipe
    assert all(block == blocks["none"] for block in blocks.values())


# --- with NeMo-RL


@pytest.fixture(scope="module")
def config_module():
    return pytest.importorskip("nemo_rl.utils.config", reason="NeMo-RL is not importable here", exc_type=ImportError)


@pytest.fixture(scope="module")
def master_config(config_module):
    if sys.version_info < (3, 12):  # pydantic needs the newer TypedDict, as NeMo-RL's own Python has
        typing.TypedDict = pytest.importorskip("typing_extensions").TypedDict
    try:
        return importlib.import_module("nemo_rl.algorithms.grpo").MasterConfig
    except ImportError as error:
        pytest.skip(f"NeMo-RL's trainer is not importable here: {error}")


@pytest.fixture
def theirs(config_module, monkeypatch):
    """A recipe as NeMo-RL's own loader reads it."""
    from omegaconf import OmegaConf

    root = nemo_rl_root()
    if root is None:
        pytest.skip("NeMo-RL is installed without its examples")
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    config_module.register_omegaconf_resolvers()
    return lambda path: OmegaConf.to_container(config_module.load_config(path), resolve=True)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nemo_rl_reads_it_as_we_do(path, theirs):
    assert theirs(path) == load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nemo_rls_own_schema_accepts_it(path, theirs, master_config):
    from pydantic import TypeAdapter

    accepted = TypeAdapter(master_config).validate_python(theirs(path))
    loss_fn = accepted["loss_fn"] if isinstance(accepted, dict) else accepted.loss_fn
    if not isinstance(loss_fn, dict):
        # v0.7.0 on: the keys that NeMo-RL does not know come through.
        assert build_loss(loss_fn).config == build_loss(load_recipe(path)["loss_fn"]).config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_known_against_it(path, monkeypatch):
    root = nemo_rl_root()
    if root is None:
        pytest.skip("no NeMo-RL checkout: set NEMO_RL_ROOT")
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    recipe = read_recipe(path)
    report = check(RecipeFacts.from_recipe(recipe, gpu="H100"))
    replays = recipe.data["policy"].get("router_replay", {}).get("enabled", False)
    # v0.6.0 does not read the key, as the recipe's comment says.
    expected = {"GM205"} if replays and not reads_setting(root, ROUTER_REPLAY) else set()
    assert {finding.rule.id for finding in report.findings if finding.rule.severity != "note"} == expected
