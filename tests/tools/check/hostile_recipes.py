"""Recipes that cost minutes or gigabytes, or end in a traceback, where a reader trusts its input."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

VALID = "grpo: {num_prompts_per_step: 4}\nloss_fn: {name: clipped_pg}\n"
Recipe = str | bytes | Callable[[Path], object]
"""Text of ``recipe.yaml``, or a function that writes the files into a folder."""


def _nested(opening: str, closing: str, depth: int) -> str:
    return "a: " + opening * depth + closing * depth


def _chain(first: str, line: str, levels: int = 40) -> str:
    """``a0`` and lines for ``a1``, ``a2``, …; ``{p}`` stands for the previous key."""
    return "\n".join([f"a0: {first}", *(line.format(i=i, p=f"a{i - 1}") for i in range(1, levels))])


def _aliases(first: str, item: str, levels: int = 30, width: int = 9) -> str:
    lines = [f"a0: &a0 {first}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} " + item.format(", ".join([f"*a{level - 1}"] * width)))
    return "\n".join(lines)


def _defaults(target: str) -> Recipe:
    return f"defaults: {target}\n{VALID}"


def _fifo_parent(folder: Path) -> None:
    os.mkfifo(folder / "parent.yaml")
    (folder / "recipe.yaml").write_text(f"defaults: parent.yaml\n{VALID}")


def _diamond(folder: Path) -> None:
    for level in range(30):
        (folder / f"r{level}.yaml").write_text(f"defaults: [r{level + 1}.yaml, r{level + 1}.yaml]\n")
    (folder / "r30.yaml").write_text(VALID)
    (folder / "recipe.yaml").write_text("defaults: r0.yaml\n")


def _cycle(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("defaults: other.yaml\n")
    (folder / "other.yaml").write_text("defaults: recipe.yaml\n")


def _loop_of_links(folder: Path) -> None:
    (folder / "recipe.yaml").symlink_to("other.yaml")
    (folder / "other.yaml").symlink_to("recipe.yaml")


def _many_large_parents(folder: Path) -> None:
    for index in range(50):
        (folder / f"p{index}.yaml").write_text("".join(f"k{index}_{key}: 1\n" for key in range(5000)))
    (folder / "recipe.yaml").write_text(f"defaults: [{', '.join(f'p{index}.yaml' for index in range(50))}]\n{VALID}")


def _parents_of_a_large_one(folder: Path) -> None:
    (folder / "large.yaml").write_text("".join(f"k{i}: 1\n" for i in range(9000)))
    (folder / "small.yaml").write_text("a: 1\n")
    (folder / "recipe.yaml").write_text(f"defaults: [large.yaml{', small.yaml' * 97}]\n{VALID}")


def _sparse(folder: Path) -> None:
    with open(folder / "recipe.yaml", "wb") as file:
        file.truncate(50 << 30)


# Recipes that exceed a limit, with the limit that the error must name; test_input_limits.py has those of YAML alone.
OVER_A_LIMIT: dict[str, tuple[Recipe, str]] = {
    "alias bomb of merges": (_aliases("{x: 1}", "{{<<: [{}]}}"), "nodes"),
    "doubled text": (_chain("xxxxxxxxxx", "a{i}: ${{{p}}}${{{p}}}"), "references"),
    "large mapping, often": (
        "a: {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}\nb: [" + "'${a}', " * 1000 + "]\n",
        "nodes",
    ),
    "squared": (_chain("99999999999", "a{i}: ${{mul:${{{p}}},${{{p}}}}}"), "number_digits"),
    "repeated text": ("a: ${mul:x,1000000000}\n", "string_characters"),
    "decoded text": ("a: '" + "[" * 200_000 + "'\nb: ${oc.decode:${a}}\n", "reference_characters"),
    "open references": ("a: '" + "${" * 60_000 + "'\n", "reference_characters"),
    "references nested by resolvers": ("a: ${" + "mul:1,${" * 400 + "mul:1,1}" + "}" * 400 + "\n", "nesting"),
    "chain of references": (_chain("1", "a{i}: ${{{p}}}", levels=2000), "nesting"),
    "unresolvable paths": ("data: [" + "'${oc.env:NO_SUCH_NAME}', " * 9000 + "]\n" + VALID, "reference_characters"),
    "devices as parents": (_defaults("/dev/zero"), "device"),
    "FIFO as parent": (_fifo_parent, "FIFO"),
    "diamonds of parents": (_diamond, "files"),
    "many large parents": (_many_large_parents, "nodes"),
    "many parents beside a large one": (_parents_of_a_large_one, "merged_settings"),
    "sparse file of 50 GB": (_sparse, "file_bytes"),
    "long name of a large section": (
        "? " + "x" * 900_000 + "\n: {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}\n" + VALID,
        "total_characters",
    ),
    "name of many parts": ("? " + ".".join("a" * 400_000) + "\n: 1\n" + VALID, "nesting"),
}

# Recipes that can't be read, without a limit being exceeded.
MALFORMED: dict[str, Recipe] = {
    "cycle of parents": _cycle,
    "loop of links": _loop_of_links,
    "null character in a parent's name": _defaults('"a\\0b"'),
    "parent that is a folder": _defaults("/"),
    "reference to itself": "a: ${a}\n",
    "parent by a circle of references": "a: ${b}\nb: ${a}\ndefaults: ${a}\n",
    "no text": b"\xff\xfe\x00",
    "two documents": "a: 1\n---\nb: 2\n",
    "a list": "- 1\n",
    "python object": "a: !!python/object/apply:os.system ['touch executed']\n",
    "unknown tag": "a: !thing {b: 1}\n",
    "division by zero": "a: ${div:1,0}\n",
    "sum of a word and a number": "a: ${add:x,1}\n",
    "unknown resolver": "a: ${shell:ls}\n",
    "open reference": "a: '${'\n",
    "mark of override that is missing": "defaults: [p.yaml]\nx: {_override_: ???}\n",
}

# Recipes that can be read, whose content is strange. Any exit status will do; a traceback will not.
STRANGE: dict[str, str] = {
    "2,000 unknown keys": "loss_fn: {name: gspo, "
    + ", ".join(f"truncated_importance_sampling_ratio_m{i}: 1" for i in range(2000))
    + "}\n",
    "2,000 unknown keys of NeMo-RL": "loss_fn: {name: gspo}\ngrpo: {"
    + ", ".join(f"num_prompts_per_step_{i}: 1" for i in range(2000))
    + "}\n",
    "nothing": "",
    "numbers as keys": "1: {2: 3}\ngrpo: {1: 2}\n" + VALID.partition("\n")[2],
    "dots in keys": f"a.b: 1\ndata: {{'a.b': '${{oc.env:NO_SUCH_NAME}}', 'c[0]': 1}}\n{VALID}",
    "sections that are lists": "grpo: [1]\nloss_fn: [2]\npolicy: [3]\ncluster: [4]\n",
    "sections that are null": "grpo:\nloss_fn:\npolicy:\ncluster:\n",
    "infinite sizes": "grpo: {num_prompts_per_step: .inf, num_generations_per_prompt: .nan}\nloss_fn: {name: gspo}\n"
    "policy: {train_global_batch_size: .nan, max_total_sequence_length: -.inf, generation: {temperature: .nan}}\n",
    "large sizes": "grpo: {num_prompts_per_step: 1" + "0" * 400 + "}\nloss_fn: {name: gspo}\n"
    "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 1" + "0" * 400 + "}}\n",
    "negative sizes": "grpo: {num_prompts_per_step: -1}\nloss_fn: {name: gspo}\n"
    "cluster: {gpus_per_node: -8, num_nodes: 0}\n"
    "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: -2, pipeline_model_parallel_size: 0}}\n",
    "mappings for numbers": "grpo: {num_prompts_per_step: {a: 1}}\nloss_fn: {name: {a: 1}, masks: {a: 1}}\n"
    "policy: {model_name: [1], generation: 5, megatron_cfg: yes, dtensor_cfg: []}\n",
    "masks of everything": "grpo: {}\nloss_fn: {name: gspo, masks: [1, [2], null, {preset: [1]}, {preset: {}}]}\n",
    "mappings nested 90 deep": f"{_nested('{a: ', '}', 90)}\n{VALID}",
    "model that is a device": f"policy: {{model_name: /dev/zero}}\n{VALID}",
    "model with a null character": f'policy: {{model_name: "a\\0b"}}\n{VALID}',
}
