"""Fixes of findings: the edit of the text, the command that writes them, and what they do to NeMo-RL's own recipes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_geomask.cli import main
from nemo_geomask.config.conflicts import find_conflicts
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.source_words import words_in_source
from nemo_geomask.recipe import Recipe, nemo_rl_root, read_recipe
from nemo_geomask.recipe import recipe_file as recipes
from nemo_geomask.recipe.origins import Origins
from nemo_geomask.recipe.yaml_edit import rename_in_text, set_in_text
from nemo_geomask.tools.check import RULES, Finding, RecipeFacts, check
from nemo_geomask.tools.check.model_shapes import has_experts
from nemo_geomask.tools.check.recipe_check import UNCHECKED_SECTIONS
from nemo_geomask.tools.check.recipe_fixes import fix_recipe
from nemo_geomask.tools.check.setting_author import user_keys
from nemo_geomask.tools.check.word_rules import nearest_word
from nemo_geomask.yaml_text import inline_yaml

TEXT = """\
# head
grpo:   # about it
  a: 1  # one
  b: {c: 1, d: 2}  # flow
  items:
    - {x: 1}
    - y: 2

# before the loss
loss_fn:
  name: gspo
  text: |
    hello

  e:
env: {}
"""


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("grpo.a", 2, "  a: 1  # one", "  a: 2  # one"),
        ("grpo.b.c", False, "{c: 1, d: 2}", "{c: false, d: 2}"),
        ("grpo.b.q", 1e-6, "{c: 1, d: 2}", "{c: 1, d: 2, q: 1.0e-06}"),
        ("grpo.b.z.w", "x y", "{c: 1, d: 2}", '{c: 1, d: 2, z: {w: "x y"}}'),
        ("grpo.items[0].x", 9, "{x: 1}", "{x: 9}"),
        ("grpo.items[1].y", None, "y: 2", "y: null"),
        ("grpo.new", 1, "- y: 2\n", "- y: 2\n  new: 1\n"),
        ("grpo.p.q.r", 0.5, "- y: 2\n", "- y: 2\n  p:\n    q:\n      r: 0.5\n"),
        ("loss_fn.e", 3, "  e:\n", "  e: 3\n"),
        ("env.math.k", "v", "env: {}", "env: {math: {k: v}}"),
        ("top.k", [1], "env: {}\n", "env: {}\ntop:\n  k: [1]\n"),
    ],
)
def test_one_setting_changes_and_the_layout_stays(key, value, before, after):
    assert set_in_text(TEXT, key, value, inline_yaml(value)) == TEXT.replace(before, after, 1)


@pytest.mark.parametrize("key", ["loss_fn.text", "grpo.a.b", "grpo.items"])
def test_what_takes_more_than_a_line_is_refused(key):
    with pytest.raises(ConfigError, match="does not allow an edit of one line"):
        set_in_text(TEXT, key, 1, "1")


def test_an_anchor_is_not_edited_for_all_that_refer_to_it():
    with pytest.raises(ConfigError, match="does not allow"):
        set_in_text("a: &x {b: 1}\nc: *x\n", "c.b", 2, "2")


@pytest.mark.parametrize(
    ("text", "result"),
    [("", "a:\n  b: 1\n"), ("# c", "# c\na:\n  b: 1\n"), ("a:\n  c: 2", "a:\n  c: 2\n  b: 1\n")],
)
def test_short_files(text, result):
    assert set_in_text(text, "a.b", 1, "1") == result


PARENT = "policy: {megatron_cfg: {enabled: true}, max_grad_norm: 0}\nloss_fn: {name: clipped_pg}\ngrpo: {}\n"
CHILD = "defaults: parent.yaml\r\n# mine\r\npolicy:\r\n  generation: {top_p: 95}  # per cent\r\n"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parent.yaml").write_text(PARENT)
    path = tmp_path / "recipe.yaml"
    path.write_bytes(CHILD.encode())
    os.chmod(path, 0o640)
    return path


def test_the_command_prints_and_writes_them(recipe, capsys):
    main(["check", "recipe.yaml", "--format", "json"])
    fixes = [finding["fix"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert fixes == [{"policy.max_grad_norm": 1.0}, {"policy.generation.top_p": 0.95}]
    assert main(["check", "recipe.yaml", "--diff"]) == 2
    patch = capsys.readouterr().out
    assert patch.startswith("--- recipe.yaml\n+++ recipe.yaml\n@@")
    assert "+  max_grad_norm: 1.0" in patch
    assert recipe.read_bytes() == CHILD.encode()
    assert main(["check", "recipe.yaml", "--fix"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "recipe.yaml: fixed GM339 policy.max_grad_norm, GM339 policy.generation.top_p\n"
    assert "0 errors" in printed.out
    assert recipe.read_bytes() == (CHILD.replace("95", "0.95") + "  max_grad_norm: 1.0\r\n").encode()
    assert recipe.stat().st_mode & 0o777 == 0o640


def test_nothing_is_written_through_a_link_or_against_an_override(recipe, capsys, tmp_path):
    (tmp_path / "link.yaml").symlink_to(recipe)
    assert main(["check", "link.yaml", "--fix"]) == 2
    assert "link.yaml: is a link" in capsys.readouterr().err
    assert main(["check", "recipe.yaml", "++policy.generation.top_p=80", "--fix"]) == 2
    assert "not fixed: GM339 policy.generation.top_p: change the override" in capsys.readouterr().err
    assert b"top_p: 95" in recipe.read_bytes()


def test_a_fix_that_another_one_contradicts_waits_for_the_next_check(recipe):
    facts = RecipeFacts.from_recipe(read_recipe(recipe))
    first, second = check(facts).findings
    other = Finding(second.rule, second.key, second.message, second.origin, {"policy.max_grad_norm": 2.0})
    fixed = fix_recipe(facts.recipe, (first, other))
    assert [finding.key for finding in fixed.applied] == ["policy.max_grad_norm"]
    assert "another finding has set 1.0; check again" in fixed.refused[0]


def test_a_misspelt_key_is_renamed_where_it_is_written(recipe):
    text = recipe.read_text()
    assert rename_in_text(text, "policy.generation.top_p", "top_k") == text.replace("top_p", "top_k")
    for key, name in (("policy.generation", "generation"), ("policy.max_grad_norm", "x"), ("loss_fn.a.b", "x")):
        with pytest.raises(ConfigError, match="do so by hand"):
            rename_in_text(text, key, name)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("vlm", "vllm"),
        ("VLLM", "vllm"),
        ("gea", "gae"),
        ("MathDS", ""),
        ("foo", ""),
        ("hybrd", "hybridep"),
        ("math_hf_processor", "math_hf_data_processor"),
        ("k4", ""),  # as near to k1 as to k2
        ("OpenMathInstruct3", "OpenMathInstruct-2"),
    ],
)
def test_only_a_misspelling_has_a_nearest_word(value, word):
    words = ("vllm", "gae", "math", "refcoco", "OpenMathInstruct-2", "openai_format", "hybridep", "k1", "k2")
    words += ("math_data_processor", "math_hf_data_processor")
    assert "".join(nearest_word(value, words)) == word


def test_a_key_has_the_words_of_its_own_section_registry_and_algorithm(tmp_path):
    modules = {
        "response_datasets.py": 'NAMES = {"a": 1}\ndef load(dataset_name):\n    return NAMES[dataset_name]\n',
        "preference_datasets.py": 'NAMES = {"b": 1}\ndef load(dataset_name):\n    return NAMES[dataset_name]\n',
        "distilled.py": "class DistilledLossFn:\n    def __init__(self, cfg):\n        self.kl_type = cfg.kl_type\n"
        '        assert self.kl_type in ["forward", "mixed"]\n',
        "rewards.py": 'def start(cfg):\n    for each in cfg["reward_functions"]:\n        name = each["name"]\n'
        '        if name == "format":\n            pass\n        elif name == "exact":\n            pass\n'
        "        else:\n            raise ValueError\n",
        "processors.py": 'MADE = {"p": 1}\ndef add(name):\n    MADE[name] = 1\n'
        'def load(cfg):\n    assert cfg["processor"] in MADE\n',
        "plane.py": 'def start(data_plane):\n    assert data_plane["backend"] in ("nccl", "x")\n',
        "loss.py": 'TRANSPORTS = Literal["nixl", "zmq"]\n'
        "def kl(kl_type, transport):\n"
        '    if kl_type == "k1":\n        return 1\n    elif kl_type == "k2":\n        return 2\n'
        "    else:\n        raise ValueError\n"
        "class PolicyLossFn:\n    def call(self, cfg):\n        kl(kl_type=self.reference_policy_kl_type)\n"
        '        transport = cfg.get("refit_transport")\n'
        '        if transport not in get_args(TRANSPORTS) and ":" not in transport:\n            raise ValueError\n',
        "grpo.py": 'def run(generation):\n    assert generation["backend"] in ("vllm", "sglang")\n'
        '    for metric_name in ("r",):\n        assert metric_name in ("reward", "loss")\n',
    }
    (tmp_path / "nemo_rl").mkdir()
    for name, text in modules.items():
        (tmp_path / "nemo_rl" / name).write_text(text)

    def accepted(section, key, algorithm="grpo"):
        return words_in_source(tmp_path, section, key, algorithm).accepted

    assert accepted("train", "dataset_name") == {"a"}
    assert accepted("train", "dataset_name", "dpo") == {"b"}
    # A class that checks its own setting; items of a list; a registry to which a function adds.
    assert accepted("loss_fn", "kl_type", "distillation") == {"forward", "mixed"}
    assert accepted("reward_functions", "name") == {"format", "exact"}
    assert accepted("default", "processor") == set()
    assert words_in_source(tmp_path, "default", "processor", "grpo").registered == {"p"}
    assert accepted("generation", "backend") == {"vllm", "sglang"}
    assert accepted("data_plane", "backend") == {"nccl", "x"}
    assert accepted("checkpointing", "metric_name") == set()
    assert accepted("loss_fn", "reference_policy_kl_type") == {"k1", "k2"}
    assert accepted("generation", "refit_transport") == {"nixl", "zmq"}


def test_settings_in_a_list_that_an_override_sets_are_the_users(recipe):
    override = "+policy.scheduler=[{name: torch.optim.X, kwargs: {T_max: 100}}]"
    facts = RecipeFacts.from_recipe(read_recipe(recipe, [override]))
    assert {"policy.scheduler[0].name", "policy.scheduler[0].kwargs.T_max"} <= {key for key, _ in user_keys(facts)}


def test_the_fix_changes_what_the_user_has_just_set(recipe):
    (recipe.parent / "parent.yaml").write_text(PARENT + "cluster: {gpus_per_node: 8}\n")
    lora = "dtensor_cfg: {enabled: true, _v2: true, lora_cfg: {enabled: true, use_triton: false}}"
    recipe.write_text(f"defaults: parent.yaml\npolicy: {{{lora}, megatron_cfg: {{enabled: false}}}}\n")

    def fixes(*overrides):
        facts = RecipeFacts.from_recipe(read_recipe(recipe, overrides))
        return [finding.fix for finding in check(facts).findings if finding.rule.id == "GM343"]

    assert fixes() == []
    assert fixes("policy.dtensor_cfg._v2=false") == [{"policy.dtensor_cfg._v2": True}]


@given(
    prompts=st.integers(1, 40),
    responses=st.integers(1, 16),
    batch=st.integers(1, 300),
    micro=st.integers(1, 4),
    gpus=st.integers(1, 9),
)
def test_one_fix_of_the_batch_suits_rollouts_and_ranks(prompts, responses, batch, micro, gpus):
    policy = {"train_global_batch_size": batch, "train_micro_batch_size": micro, "dtensor_cfg": {"enabled": True}}
    data = {
        "policy": policy,
        "loss_fn": {"name": "clipped_pg"},
        "grpo": {"num_prompts_per_step": prompts, "num_generations_per_prompt": responses},
        "cluster": {"gpus_per_node": gpus, "num_nodes": 1},
    }

    def batch_findings():
        facts = RecipeFacts.from_recipe(Recipe(Path("recipe.yaml"), data, Origins({}), ()))
        return [hit for rule in RULES if rule.id in ("GM306", "GM332") for hit in rule.check(facts)]

    for finding in batch_findings()[:1]:
        for key, value in finding.fix.items():
            section, name = key.split(".")
            data[section][name] = value
    assert batch_findings() == []


_CHOICES = {
    "token_level_loss": (True, False),
    "loss_normalization": (None, "tokens", "constant", "documents"),
    "loss_normalization_constant": (None, 8.0),
    "sequence_level_importance_ratios": (False, True),
    "use_cispo": (False, True),
    "ratio_clip_c": (None, 3.0),
    "disable_ppo_ratio": (False, True),
    "ratio_anchor": ("prev", "gen"),
    "use_importance_sampling_correction": (False, True),
    "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
    "truncated_importance_sampling_ratio": (None, 2.0, 1.5),
    "truncated_importance_sampling_ratio_min": (None, 0.5, 1.75),
    "is_correction_level": (None, "token", "sequence"),
    "is_correction_batch_normalize": (False, True),
    "audit_fraction": (0.0, 0.5),
    "metrics": ("full", "nemo_rl"),
    "kl_tokens": ("trained", "kept"),
    "kl_ratio_anchor": ("gen", "prev"),
    "use_kl_in_reward": (False, True),
    "reference_policy_kl_type": ("k3", "k4"),
    "reference_policy_kl_gradient": (None, "k2"),
    "positive_example_nll_normalization": ("microbatch", "loss"),
    "denominator": ("original", "kept"),
}


@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in _CHOICES.items()}))
def test_the_fix_of_a_conflict_resolves_it(settings):
    for severity in ("error", "warning"):
        for conflict in find_conflicts(LossSettings(**settings), severity):
            if conflict.fix:
                assert "{fix}" in conflict.template or "swap them" in conflict.template
                fixed = find_conflicts(LossSettings(**{**settings, **conflict.fix}), severity)
                assert conflict.keys not in [each.keys for each in fixed]


@pytest.mark.long
def test_no_fix_of_nemo_rls_own_recipes_leads_to_an_error(tmp_path):
    root = nemo_rl_root()
    if root is None or not (root / "examples" / "configs" / "recipes").is_dir():
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")

    def findings_of(path):
        return check(RecipeFacts.from_recipe(read_recipe(path, leave=UNCHECKED_SECTIONS))).findings

    new_errors, applied = [], 0
    for path in sorted((root / "examples" / "configs").rglob("*.yaml")):
        if "defaults:" not in path.read_text(encoding="utf-8") and "policy:" not in path.read_text(encoding="utf-8"):
            continue
        findings = findings_of(path)
        errors = {(finding.rule.id, finding.key) for finding in findings if finding.rule.severity == "error"}
        for finding in findings:
            if not finding.fix:
                continue
            text = f"defaults: {path}\n"
            for key, value in finding.fix.items():
                text = set_in_text(text, key, value, inline_yaml(value))
            fixed = tmp_path / "fixed.yaml"
            fixed.write_text(text, encoding="utf-8")
            for each in findings_of(fixed):
                is_same = (each.rule.id, each.key) == (finding.rule.id, finding.key)
                is_new = each.rule.severity == "error" and (each.rule.id, each.key) not in errors
                if is_same or is_new:
                    new_errors.append((path.name, finding.rule.id, each.rule.id, each.key, each.message))
            applied += 1
    assert new_errors == []
    assert applied > 50


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("Qwen/Qwen3-30B-A3B-Instruct-2507", "deepseek-ai/DeepSeek-R1-0528")),
        *((name, True) for name in ("allenai/OLMoE-1B-7B-0924-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct")),
        *((name, True) for name in ("ibm-granite/granite-3.1-3b-a800m-instruct", "inclusionAI/Ling-mini-2.0")),
        *(
            (name, True)
            for name in ("XiaomiMiMo/MiMo-V2-Flash", "ai21labs/AI21-Jamba-1.5-Mini", "zai-org/GLM-4.7-Flash")
        ),
        *((name, None) for name in ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "XiaomiMiMo/MiMo-7B-RL", "Qwen/Qwen3-8B")),
        ("Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md", None),
        ("my/own-A3B", None),
        ("a" * 5000, None),
    ],
)
def test_experts_by_exact_names(name, expected):
    assert has_experts(name) == expected


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, None, True),
        ({"model_type": "deepseek_v3"}, None, True),
        ({"model_type": "qwen3"}, None, False),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, {}, True),
        ({"model_type": "qwen3"}, {"num_experts": 4}, True),
        ({"model_type": "qwen3_moe", "num_experts": 1}, None, False),
    ],
)
def test_experts_by_a_local_configuration(config, overrides, expected, tmp_path):
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert has_experts(str(folder), overrides) == expected
