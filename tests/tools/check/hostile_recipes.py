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


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "recipe.yaml")


def _fifo_parent(folder: Path) -> None:
    os.mkfifo(folder / "parent.yaml")
    (folder / "recipe.yaml").write_text(f"defaults: parent.yaml\n{VALID}")


def _diamond(folder: Path) -> None:
    for level in range(30):
        (folder / f"r{level}.yaml").write_text(f"defaults: [r{level + 1}.yaml, r{level + 1}.yaml]\n")
    (folder / "r30.yaml").write_text(VALID)
    (folder / "recipe.yaml").write_text("defaults: r0.yaml\n")


def _long_chain(folder: Path) -> None:
    for level in range(2000):
        (folder / f"r{level}.yaml").write_text(f"defaults: r{level + 1}.yaml\n")
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


def _parents_of_other_settings(folder: Path) -> None:
    for number in range(98):
        (folder / f"p{number}.yaml").write_text("".join(f"k{number}_{i}: 1\n" for i in range(98)))
    (folder / "recipe.yaml").write_text(f"defaults: [{', '.join(f'p{i}.yaml' for i in range(98))}]\n{VALID}")


def _sparse(folder: Path) -> None:
    with open(folder / "recipe.yaml", "wb") as file:
        file.truncate(50 << 30)


def _device(folder: Path) -> None:
    (folder / "recipe.yaml").symlink_to("/dev/zero")


def _folder(folder: Path) -> None:
    (folder / "recipe.yaml").mkdir()
    (folder / "recipe.yaml" / "x.yaml").write_text(f"defaults: /dev/zero\n{VALID}")


# Recipes that exceed a limit, with the limit that the error must name.
OVER_A_LIMIT: dict[str, tuple[Recipe, str]] = {
    "alias bomb of lists": (_aliases("[x]", "[{}]"), "nodes"),
    "alias bomb of mappings": (_aliases("{x: 1}", "{{a: [{}]}}"), "nodes"),
    "alias bomb of merges": (_aliases("{x: 1}", "{{<<: [{}]}}"), "nodes"),
    "alias to itself": ("a: &a [*a]\n", "nesting"),
    "alias to its mapping": ("a: &a {b: *a}\n", "nesting"),
    "wide alias bomb": ("a: &a [" + "1, " * 5000 + "]\nb: [" + "*a, " * 2000 + "]\n", "nodes"),
    "doubled text": (_chain("xxxxxxxxxx", "a{i}: ${{{p}}}${{{p}}}"), "references"),
    "doubled empty text": (_chain("''", "a{i}: ${{{p}}}${{{p}}}"), "references"),
    "doubled long text": (_chain("x" * 100_000, "a{i}: ${{{p}}}${{{p}}}"), "total_characters"),
    "text of many references": ("a: " + "x" * 900_000 + "\nb: '" + "${a}" * 1000 + "'\n", "total_characters"),
    "doubled mapping": (_chain("{x: 1}", "a{i}: {{l: '${{{p}}}', r: '${{{p}}}'}}"), "references"),
    "doubled list": (_chain("[1]", "a{i}: ['${{{p}}}', '${{{p}}}']"), "references"),
    "large mapping, often": (
        "a: {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}\nb: [" + "'${a}', " * 1000 + "]\n",
        "nodes",
    ),
    "squared": (_chain("99999999999", "a{i}: ${{mul:${{{p}}},${{{p}}}}}"), "number_digits"),
    "squared fraction": (_chain("1e300", "a{i}: ${{mul:${{{p}}},${{{p}}}}}"), "references"),
    "doubled by add": (_chain("'abcdefghij'", "a{i}: ${{add:${{{p}}},${{{p}}}}}"), "references"),
    "long text doubled by add": (_chain("x" * 400_000, "a{i}: ${{add:${{{p}}},${{{p}}}}}"), "total_characters"),
    "repeated text": ("a: ${mul:x,1000000000}\n", "string_characters"),
    "repeated list": ("a: ${mul:[1,2],1000000000}\n", "string_characters"),
    "repeated text in a section of paths": ("data: {a: '${mul:x,1000000000}'}\n", "string_characters"),
    "decoded text": ("a: '" + "[" * 200_000 + "'\nb: ${oc.decode:${a}}\n", "reference_characters"),
    "created text": (_chain("x", "a{i}: ${{oc.create:{{l:${{{p}}},r:${{{p}}}}}}}"), "references"),
    "default references": (_chain("x", "a{i}: ${{oc.env:NONE,${{{p}}}${{{p}}}}}"), "references"),
    "reference over 100,000 characters": ("a: 1\nb: '" + "${a}" * 30_000 + "'\n", "reference_characters"),
    "open references": ("a: '" + "${" * 60_000 + "'\n", "reference_characters"),
    "reference that is never closed": ("a: '${mul:" + "1," * 60_000 + "'\n", "reference_characters"),
    "references nested by resolvers": ("a: ${" + "mul:1,${" * 400 + "mul:1,1}" + "}" * 400 + "\n", "nesting"),
    "chain of references": (_chain("1", "a{i}: ${{{p}}}", levels=2000), "nesting"),
    "mappings nested by references": (_chain("{}", "a{i}: {{x: '${{{p}}}'}}", levels=600), "references"),
    "unresolvable paths": ("data: [" + "'${oc.env:NO_SUCH_NAME}', " * 9000 + "]\n" + VALID, "reference_characters"),
    "devices as parents": (_defaults("/dev/zero"), "device"),
    "random parents": (_defaults("/dev/urandom"), "device"),
    "terminal as parent": (_defaults("/dev/tty"), ""),
    "FIFO": (_fifo, "FIFO"),
    "FIFO as parent": (_fifo_parent, "FIFO"),
    "link to a device": (_device, "device"),
    "device below a folder": (_folder, "device"),
    "diamonds of parents": (_diamond, "files"),
    "long chain of parents": (_long_chain, "files"),
    "many large parents": (_many_large_parents, "nodes"),
    "many parents beside a large one": (_parents_of_a_large_one, "merged_settings"),
    "many parents of other settings": (_parents_of_other_settings, "merged_settings"),
    "sparse file of 50 GB": (_sparse, "file_bytes"),
    "brackets 300 deep": (_nested("[", "]", 300), "nesting"),
    "brackets 100,000 deep": (_nested("[", "]", 100_000), "nesting"),
    "open brackets": ("a: " + "[" * 1_000_000, "nesting"),
    "braces 300 deep": (_nested("{a: ", "}", 300), "nesting"),
    "indented 300 deep": ("\n".join(" " * depth + "a:" for depth in range(300)), "nesting"),
    "dashes 3000 deep": ("- " * 3000 + "a", "nesting"),
    "long name of a large section": (
        "? " + "x" * 900_000 + "\n: {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}\n" + VALID,
        "total_characters",
    ),
    "name of many parts": ("? " + ".".join("a" * 400_000) + "\n: 1\n" + VALID, "nesting"),
    "name of many brackets": ("? '" + "[" * 400_000 + "'\n: 1\n" + VALID, "nesting"),
    "value of 20 MB": ("a: '" + "x" * 20_000_000 + "'", "file_bytes"),
    "plain value of 3 MB": ("a: " + "x y" * 1_000_000, "string_characters"),
    "block of 3 MB": ("a: |\n" + "  xxxxxxxxx\n" * 250_000, "string_characters"),
    "folded text of 3 MB": ("a: >\n" + "  xxxxxxxxx\n" * 250_000, "string_characters"),
    "key of 3 MB": ("'" + "x" * 3_000_000 + "': 1", "string_characters"),
    "binary of 3 MB": ("a: !!binary " + "x" * 3_000_000, "string_characters"),
    "300,000 keys": ("".join(f"k{i}: 1\n" for i in range(300_000)), "nodes"),
    "300,000 items": ("a: [" + "1, " * 300_000 + "]", "nodes"),
    "300,000 empty items": ("a:\n" + "-\n" * 300_000, "nodes"),
    "integer of 100,000 digits": ("a: " + "9" * 100_000, "number_digits"),
    "hexadecimal integer of a million digits": ("a: 0x" + "f" * 900_000, "number_digits"),
    "integer to base 60": ("a: 1" + ":59" * 200_000, "number_digits"),
    "tagged integer to base 60": ("a: !!int '1" + ":59" * 200_000 + "'", "number_digits"),
}

# Recipes that can't be read, without a limit being exceeded.
MALFORMED: dict[str, Recipe] = {
    "cycle of parents": _cycle,
    "loop of links": _loop_of_links,
    "null character in a parent's name": _defaults('"a\\0b"'),
    "parent with a long name": _defaults("x" * 5000),
    "parent that is a folder": _defaults("/"),
    "parent that is a memory map": _defaults("/proc/self/mem"),
    "reference to itself": "a: ${a}\n",
    "reference to its section": "a: {b: '${a}'}\n",
    "circle of references": "a: ${b}\nb: ${a}\n",
    "parent by a circle of references": "a: ${b}\nb: ${a}\ndefaults: ${a}\n",
    "parents that are missing": "defaults: ???\n",
    "parents that are a mapping": "defaults: {a: b}\n",
    "no YAML": "a: [\n",
    "no text": b"\xff\xfe\x00",
    "null characters": b"a: \x00\x00\n",
    "bell": b"a: \x07\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a list": "- 1\n",
    "a number": "12\n",
    "python object": "a: !!python/object/apply:os.system ['touch executed']\n",
    "python name": "a: !!python/name:os.system\n",
    "python module": "a: !!python/module:antigravity\n",
    "unknown tag": "a: !thing {b: 1}\n",
    "integer tag on a word": "a: !!int x\n",
    "integer tag on nothing": "a: !!int ''\n",
    "boolean tag on a word": "a: !!bool maybe\n",
    "impossible date": "a: !!timestamp 2020-99-99\n",
    "date as a key": "2020-01-01: 1\n!!timestamp 2020-01-01: 2\n",
    "null as a key": "null: 1\n",
    "list as a key": "? [a, b]\n: 1\n",
    "mapping as a key": "? {a: b}\n: 1\n",
    "set": "a: !!set {b, c}\n",
    "unknown alias": "a: *b\n",
    "duplicate keys": "a: 1\na: 2\n",
    "merge of a value": "a: {<<: 1}\n",
    "division by zero": "a: ${div:1,0}\n",
    "overflow": "a: ${div:1" + "0" * 400 + ",3}\n",
    "sum of a word and a number": "a: ${add:x,1}\n",
    "unknown resolver": "a: ${shell:ls}\n",
    "resolver without arguments": "a: ${mul:}\n",
    "open reference": "a: '${'\n",
    "mark of override that is missing": "defaults: [p.yaml]\nx: {_override_: ???}\n",
}

# Recipes that can be read, whose content is strange. Any exit status will do; a traceback will not.
STRANGE: dict[str, str] = {
    "9,000 unknown keys": "loss_fn: {name: gspo, "
    + ", ".join(f"truncated_importance_sampling_ratio_m{i}: 1" for i in range(9000))
    + "}\n",
    "9,000 unknown keys of NeMo-RL": "loss_fn: {name: gspo}\ngrpo: {"
    + ", ".join(f"num_prompts_per_step_{i}: 1" for i in range(9000))
    + "}\n",
    "nothing": "",
    "ordered mapping": "a: !!omap [b: 1]\n",
    "numbers as keys": "1: {2: 3}\ngrpo: {1: 2}\n" + VALID.partition("\n")[2],
    "truth values as keys": f"true: 1\n1.5: 2\n{VALID}",
    "dots in keys": f"a.b: 1\ndata: {{'a.b': '${{oc.env:NO_SUCH_NAME}}', 'c[0]': 1}}\n{VALID}",
    "empty key": f"'': 1\n{VALID}",
    "sections that are lists": "grpo: [1]\nloss_fn: [2]\npolicy: [3]\ncluster: [4]\n",
    "sections that are words": "grpo: a\nloss_fn: b\npolicy: c\ncluster: d\ndata: e\n",
    "sections that are null": "grpo:\nloss_fn:\npolicy:\ncluster:\n",
    "infinite sizes": "grpo: {num_prompts_per_step: .inf, num_generations_per_prompt: .nan}\nloss_fn: {name: gspo}\n"
    "policy: {train_global_batch_size: .nan, max_total_sequence_length: -.inf, generation: {temperature: .nan}}\n",
    "large sizes": "grpo: {num_prompts_per_step: 1" + "0" * 400 + "}\nloss_fn: {name: gspo}\n"
    "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 1" + "0" * 400 + "}}\n",
    "large number": "grpo: {max_num_steps: 1" + "0" * 400 + "}\nloss_fn: {name: gspo}\n",
    "negative sizes": "grpo: {num_prompts_per_step: -1}\nloss_fn: {name: gspo}\n"
    "cluster: {gpus_per_node: -8, num_nodes: 0}\n"
    "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: -2, pipeline_model_parallel_size: 0}}\n",
    "mappings for numbers": "grpo: {num_prompts_per_step: {a: 1}}\nloss_fn: {name: {a: 1}, masks: {a: 1}}\n"
    "policy: {model_name: [1], generation: 5, megatron_cfg: yes, dtensor_cfg: []}\n",
    "masks of everything": "grpo: {}\nloss_fn: {name: gspo, masks: [1, [2], null, {preset: [1]}, {preset: {}}]}\n",
    "bytes": f"a: !!binary aGVsbG8=\n{VALID}",
    "nested 80 deep": f"{_nested('[', ']', 80)}\n{VALID}",
    "mappings nested 90 deep": f"{_nested('{a: ', '}', 90)}\n{VALID}",
    "model that is a device": f"policy: {{model_name: /dev/zero}}\n{VALID}",
    "model that is a FIFO's folder": f"policy: {{model_name: ., generation: {{backend: vllm}}}}\n{VALID}",
    "model with a null character": f'policy: {{model_name: "a\\0b"}}\n{VALID}',
}
