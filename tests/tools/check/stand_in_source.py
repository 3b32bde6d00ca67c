"""Source of a stand-in for NeMo-RL: the words of its refusals, and comparisons that tell words of keys."""

from __future__ import annotations

from pathlib import Path

from nemo_geomask.tools.check import RULES

WORDS = """
DATASETS = {"OpenMathInstruct-2": 1, "GSM8K": 2, "AIME2024": 3, "ResponseDataset": 4}
PROCESSORS: dict = cast(dict, {"math_data_processor": 1})


class Packing(str, Enum):
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


def register(name, function):
    PROCESSORS[name] = function


def start(config, generation_config, adv_estimator_config, dataset_name):
    backend = generation_config["backend"]
    if backend == "vllm":
        pass
    elif backend in ("megatron", "sglang"):
        pass
    else:
        raise ValueError(backend)
    if generation_config["refit_transport"] not in ("nccl_reshard", "nixl"):
        raise ValueError(backend)
    assert config["precision"] in ("float32", "bfloat16", "float16")
    name = adv_estimator_config.name
    if name == "grpo":
        pass
    elif name == "gdpo":
        pass
    elif name == "reinforce_plus_plus":
        pass
    elif name == "gae":
        pass
    else:
        raise ValueError(name)
    Packing[config["sequence_packing"]["algorithm"].upper()]
    if dataset_name in DATASETS:
        pass
    elif "." not in dataset_name:
        raise ValueError(dataset_name)
    if dataset_name not in DATASETS:
        raise ValueError(dataset_name)
    processor = PROCESSORS[config.get("processor")]
    if config.get("math_verify_impl") not in ("hf_math_verify", "dapo_math_verify"):
        raise ValueError(processor)
"""
MODULES = {
    "data/datasets/raw_dataset.py": "class RawDataset:\n    dataset: Dataset\n",
    "data/datasets/response_datasets/__init__.py": """
from nemo_rl.data.datasets.raw_dataset import RawDataset


class Math(RawDataset):
    def __init__(self, split: str = "train", split_validation_size: float = 0.05, **kwargs):
        pass


class Grades(RawDataset):
    def __init__(self, **kwargs):
        pass


class Files(Math):
    def __init__(self, data_path: str, split_validation_size: float = 0, **kwargs):
        pass


DATASET_REGISTRY = {
    "OpenMathInstruct-2": Math,
    "GSM8K": partial(Grades, variant="main"),
    "ResponseDataset": Files,
}
""",
    "environments/utils.py": """
ENV_REGISTRY = {
    "math": {
        "actor_class_fqn": "nemo_rl.environments.math_environment.One",
    },
    "math_multi_reward": {
        "actor_class_fqn": "nemo_rl.environments.math_environment.Several",
    },
}


def create_env(env_name):
    assert env_name in ENV_REGISTRY, "not registered"


def register_env(env_name, name):
    ENV_REGISTRY[env_name] = name
""",
    "models/generation/sglang/config.py": """
class SGLangConfig(TypedDict):
    sglang_cfg: dict[str, Any]


def start(config):
    return config["sglang_cfg"]
""",
    "environments/math_environment.py": """
class One(Environment):
    key = "reward"


class Several(Environment):
    key = "reward/correctness"
""",
    "algorithms/grpo.py": """
def validate():
    if True:
        val_metrics = {
            "accuracy": accuracy,
            **metrics,
        }
        val_metrics["pass_k"] = pass_k


def grpo_train():
    metrics = {
        "reward": rewards,
    }
""",
    "algorithms/dpo.py": """
class DPOValMetrics:
    loss: float
    accuracy: float
""",
}
USED_WORDS = """
policy:
  megatron_cfg:
    moe_router_dtype: fp64
  optimizer:
    name: "torch.optim.AdamW"
checkpointing:
  model_save_format: "safetensors"  # or torch_save
"""


USUAL_NUMBERS = """
policy:
  megatron_cfg:
    optimizer:
      lr: {rate}
env:
  mine:
    malus: 1.0
    bonus: {bonus}
grpo:
  reward_scaling:
    source_max: {most}
"""


def write_source(root: Path) -> None:
    """Write a module with every refusal and comparison, and an example with words, into a stand-in."""
    refusals = "".join(f"# {text}\n" for rule in RULES for text in rule.refusals)
    (root / "nemo_rl").mkdir(parents=True, exist_ok=True)
    (root / "nemo_rl" / "refusals.py").write_text(f"{refusals}\n{WORDS}", encoding="utf-8")
    for name, text in MODULES.items():
        path = root / "nemo_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    prompts = root / "examples" / "prompts"
    prompts.mkdir(parents=True)
    (prompts / "cot.txt").write_text(r"Output your answer inside of \boxed{{}} tags: {}")
    (prompts / "system.txt").write_text("Answer in tags.")
    used = root / "examples" / "used"
    used.mkdir(parents=True)
    (used / "words.yaml").write_text(USED_WORDS, encoding="utf-8")
    for number in range(8):
        text = USUAL_NUMBERS.format(rate=f"{number % 3 + 1}e-6", bonus=0.1 * (number % 4), most=number % 4 + 1)
        (used / f"numbers{number}.yaml").write_text(text, encoding="utf-8")
