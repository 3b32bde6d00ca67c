"""Hostile recipes end in one sentence within the limits of work and memory, and never run code."""

from __future__ import annotations

import difflib

import pytest

from nemo_geomask.cli import main
from tests.helpers.limited_commands import limited_commands
from tests.tools.check.hostile_recipes import MALFORMED, OVER_A_LIMIT, STRANGE

pytest.importorskip("hydra", reason="recipes are read through omegaconf and hydra (recipes extra)")

IMPORTED_BEFORE = ("hydra._internal.config_loader_impl", "omegaconf", "nemo_geomask.cli.check")
MAX_BYTES = 2**30
CLASSES = {
    "nemo_rl/algorithms/grpo.py": """
from nemo_rl.models.policy import PolicyConfig

class MasterConfig(BaseModel):
    grpo: GRPOConfig
    policy: PolicyConfig
    cluster: ClusterConfig


class GRPOConfig(TypedDict):
    num_prompts_per_step: int
    max_num_steps: float


class ClusterConfig(TypedDict):
    gpus_per_node: int
    num_nodes: int
""",
    "nemo_rl/models/policy/__init__.py": """
class PolicyConfig(TypedDict):
    model_name: str
    megatron_cfg: MegatronConfig
    generation: dict[str, Any]


class MegatronConfig(TypedDict):
    enabled: Literal[True]
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: float
""",
}


def write(folder, recipe):
    if callable(recipe):
        recipe(folder)
    else:
        (folder / "recipe.yaml").write_bytes(recipe if isinstance(recipe, bytes) else recipe.encode())
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def commands():
    with limited_commands(IMPORTED_BEFORE) as running:
        yield running


def refusal(commands, path):
    outcome = commands.run("check", path)
    assert "Traceback" not in outcome.output
    assert outcome.status == 2, outcome.output
    assert outcome.peak_bytes < MAX_BYTES
    assert not (path.parent / "executed").exists()
    return outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "limit"), OVER_A_LIMIT.values(), ids=OVER_A_LIMIT)
def test_a_recipe_over_a_limit_is_refused_by_its_name(commands, tmp_path, recipe, limit):
    message = refusal(commands, write(tmp_path, recipe))
    assert f"over the limit {limit};" in message or f"{limit}, not a regular file" in message or not limit


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_recipe_is_one_error(commands, tmp_path, recipe):
    assert refusal(commands, write(tmp_path, recipe)).startswith("nemo-geomask: error: ")


@pytest.fixture(params=["no NeMo-RL", "NeMo-RL"])
def nemo_rl(request, tmp_path_factory, monkeypatch):
    """No NeMo-RL, and one whose classes declare the types of some keys."""
    if request.param == "no NeMo-RL":
        monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
        return
    root = tmp_path_factory.mktemp("RL")
    for module, classes in CLASSES.items():
        (root / module).parent.mkdir(parents=True, exist_ok=True)
        (root / module).write_text(classes)
    (root / "examples/configs").mkdir(parents=True)
    (root / "examples/configs/grpo.yaml").write_text("grpo: {num_prompts_per_step: 1}\nloss_fn: {}\n")
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))


@pytest.mark.parametrize("output_format", ["text", "json"])
@pytest.mark.parametrize("recipe", STRANGE.values(), ids=STRANGE)
@pytest.mark.usefixtures("nemo_rl")
def test_a_strange_recipe_is_judged(tmp_path, capsys, monkeypatch, recipe, output_format):
    comparisons = []
    compare = difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda *words, **options: comparisons.append(1) or compare(*words, **options)
    )
    path = write(tmp_path, recipe)
    assert main(["check", str(path), "--format", output_format]) in (0, 2)
    assert len(comparisons) <= 2000  # each takes milliseconds, so that a key is compared once
    assert "".join(capsys.readouterr()) != ""


def test_a_limit_is_raised_by_its_option(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)  # it requires more sections than this recipe has
    path = write(tmp_path, f"a: {'[' * 110}{']' * 110}\ngrpo: {{}}\nloss_fn: {{name: clipped_pg}}\n")
    assert main(["check", str(path)]) == 2
    assert "--limit nesting=NUMBER" in capsys.readouterr().err
    assert main(["check", str(path), "--limit", "nesting=120"]) == 0
    assert main(["check", str(path), "--limit", "depth=120"]) == 2
    assert "--limit depth=120: there is no limit 'depth'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--format", "json"), ("a\x1b=1",)])
def test_control_characters_reach_no_terminal(words, tmp_path, capsys):
    path = tmp_path / "r\x1b[31m\n\u202e.yaml"
    path.write_text('grpo: {}\nloss_fn: {name: clipped_pg, "a\\e[2J\\nerror GM000 b": "\\x9b\\u202e"}\n')
    assert main(["check", str(path), *words]) == 2
    printed = "".join(capsys.readouterr())
    assert printed.replace("\n", "").isprintable()
    assert not any(line.startswith("error GM000") for line in printed.splitlines())
    assert "x1b" in printed or "u001b" in printed
