"""Files that cost minutes or gigabytes, or end in a traceback, where a reader trusts its input."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

File = tuple[str, str | bytes | Callable[[Path], object]]
"""Name of a file, and its content or a function that makes it."""

RUN = "\npython -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio_high="
MILLION = 1_000_000


def _doubling(first: str, line: str, levels: int = 30) -> str:
    """A script of lines ``a1=…``, ``a2=…``; ``{p}`` stands for the previous variable."""
    return "\n".join([f"a0={first}", *(line.format(i=i, p=f"a{i - 1}") for i in range(1, levels))])


def _references(value: str) -> str:
    """Settings of verl whose clip bound is the last of 40 references, each to the one before."""
    lines = [f"a{i}: {value.format(p=f'a{i - 1}')}" for i in range(1, 40)]
    return "\n".join(["actor_rollout_ref: {actor: {clip_ratio_high: '${a39}'}}", "a0: 9", *lines])


def _sources(number: int, targets: int) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        for index in range(number):
            (path.parent / f"s{index}.sh").write_text(f"source s{index + 1}.sh\n" * targets)
        (path.parent / f"s{number}.sh").write_text(f"A=1{RUN}0.3")
        path.write_text(f"source s0.sh{RUN}0.3")

    return write


OVER_A_LIMIT: dict[str, tuple[File, str]] = {
    "YAML, merged aliases": (
        ("f.yaml", "a: &a {x: 1}\n" + "\n".join(f"b{i}: {{<<: [*a, *a, *a]}}" for i in range(9000))),
        "nodes",
    ),
    "YAML, long name of a large section": (
        ("f.yaml", f"? {'s' * 500_000}\n: {{{', '.join(f'k{i}: 1' for i in range(5000))}}}"),
        "total_characters",
    ),
    "JSON, brackets": (("f.json", "[" * MILLION), "nesting"),
    "JSON, a line of 1 GB": (("f.json", lambda path: _sparse(path, 10**9)), "file_bytes"),
    "TOML, a key of a million parts": (("f.toml", ".".join("a" * MILLION) + " = 1"), "nesting"),
    "TOML, many keys": (("f.toml", "\n".join(f"k{i} = 1" for i in range(100_000))), "nodes"),
    "shell, 30 lines that double an exported variable": (
        ("f.sh", _doubling("x", 'export a{i}="${{{p}}}${{{p}}}"') + RUN + "$a29"),
        "total_characters",
    ),
    "shell, 30 lines that double an array": (
        ("f.sh", "a0=(x y)\n" + "\n".join(f'a{i}=("${{a{i - 1}[@]}}" "${{a{i - 1}[@]}}")' for i in range(1, 30))),
        "nodes",
    ),
    "shell, a variable in quotes that doubles": (
        ("f.sh", "A=a\n" + 'A="$A $A"\n' * 60 + f"{RUN}$A"),
        "total_characters",
    ),
    "shell, a variable appended in branches": (
        ("f.sh", "if x; then\n" + "A+=abcdefghijklmnopqrstuvwxyz\n" * 9000 + "fi"),
        "total_characters",
    ),
    "Python, literals within literals": (
        ("f.py", "x = " + "".join(f"{{'a{i}': [" for i in range(40)) + "1," * 300_000 + "]}" * 40),
        "nodes",
    ),
    "shell, a long list of lines used often": (
        ("f.sh", f"A='{chr(10).join(['- 1'] * 5000)}'\nrun " + " ".join(f'a{i}="$A"' for i in range(50))),
        "nodes",
    ),
    "shell, many words": (("f.sh", "run " + "--a 1 " * 150_000), "nodes"),
    "shell, a script of 3 MB": (("f.sh", "# " + "x" * 3 * MILLION), "string_characters"),
    "shell, files sourced twice each": (("f.sh", _sources(30, 2)), "files"),
    "Python, a sum of 200,000 terms": (("f.py", "GRPOConfig(beta=" + "1+" * 200_000 + "1)"), "nesting"),
    "Python, a number of 90,000 hexadecimal digits": (("f.py", f"GRPOConfig(beta=0x{'f' * 90_000})"), "number_digits"),
    "Python, a number of 4,400 digits": (("f.py", f"GRPOConfig(beta={'9' * 4400})"), "more than 4,300 digits"),
    "Python, expressions within each other": (
        ("f.py", "x = " + "dict(a=f(" * 60 + f"'{'x' * 100_000}'" + "))" * 60),
        "total_characters",
    ),
    "notebook, brackets": (("f.ipynb", "[" * MILLION), "nesting"),
    "a FIFO as script": (("f.sh", os.mkfifo), "is a FIFO, not a regular file"),
    "a link to /dev/zero": (("f.yaml", lambda path: path.symlink_to("/dev/zero")), "is a character device"),
}
"""Each file, with the limit that the error names, or with words of the error."""

MALFORMED: dict[str, File] = {
    "a folder": ("f.yaml", lambda path: path.mkdir()),
    "a link to itself": ("f.yaml", lambda path: path.symlink_to(path)),
    "nothing": ("f.yaml", b""),
    "binary shell": ("f.sh", bytes(range(256)) * 100),
    "UTF-8 that breaks off": ("f.yaml", b"a: \xe2\x82"),
    "null characters in Python": ("f.py", b"GRPOConfig(beta=\0)"),
    "a Python object": ("f.yaml", "a: !!python/object/apply:os.system ['touch executed']"),
    "duplicate TOML keys": ("f.toml", "a = 1\na = 2"),
    "a preset that is a list": ("f.yaml", "preset: [decoupled_token_is]\nrollout_is: token"),
    "a mode that is a list": ("f.yaml", "actor_rollout_ref: {actor: {clip_ratio_low: [1]}}"),
    "a value that is a section": ("f.yaml", "loss_fn: {name: gspo}\nloss_fn.options: 3\nloss_fn.options.a: 1"),
    "defaults: /dev/zero": ("f.yaml", "loss_fn: {name: gspo}\ndefaults: /dev/zero"),
    "an unclosed expansion": ("f.sh", "run ${A"),
    "many here-documents": ("f.sh", "cat " + "<<A " * 5000 + "\n" + "\n" * 100_000),
    "a default with exponential backtracking": ("f.sh", "run a=${A:-" + "$aaaaaaaa" * 5000),
    "a number with quadratic backtracking": ("f.sh", "run --a " + "1" * 500_000 + "x"),
    "many unclosed arguments": ("f.sh", "run " + "'${@'" * 100_000),
    "defaults that nest": ("f.sh", _doubling("x", ": ${{a{i}:=${p}${p}}}")),
    "a file that sources itself": ("f.sh", "source f.sh\n. ./f.sh"),
    "a file that sources /dev/zero": ("f.sh", lambda path: _linked_source(path, "/dev/zero")),
    "a program alone": ("f.sh", 'python -c \'open("executed", "w")\''),
    "a notebook without cells": ("f.ipynb", '{"cells": [{"cell_type": "code"}]}'),
}
"""Files without settings that can be read: exit status 2."""

STRANGE: dict[str, File] = {
    "a spread of itself": ("f.py", "GRPOConfig(**GRPOConfig)"),
    "Python, a dict in itself": ("f.py", "a = {}\na['a'] = a\nb = {**a}\nGRPOConfig(beta=a, **a)"),
    "Python, a number that doubles": ("f.py", "a = 2\n" + "a = a * a\n" * 5000 + "GRPOConfig(beta=a)"),
    "Python, a parser called 10,000 times": (
        "f.py",
        '"""\npython x.py --beta 0.1\n"""\n' + "TrlParser(GRPOConfig)\n" * 10_000,
    ),
    "Python, calls of a call": ("f.py", "a(" + "1," * 400_000 + ")" + "()" * 60 + "\nGRPOConfig(beta=0.1)"),
    "half a surrogate pair": ("f.py", 'GRPOConfig(loss_type="\\ud800x", beta=0.1)'),
    "a power of powers": ("f.sh", RUN + "$((9**9**9**9))"),
    "a division by zero": ("f.sh", RUN + "$((1/0))"),
    "1,500 unknown settings": ("f.sh", RUN + "0.3 " + " ".join(f"+clip_ratio_hihg{i}=1" for i in range(1500))),
    "control characters": ("f.yaml", 'actor_rollout_ref: {rollout: {n: 4}}\n"a\\e]0;b\\a": 1'),
    "a deep value of a word": ("f.sh", RUN + "0.3 +a.b='" + "[" * 100_000 + "'"),
    "references that double": ("f.yaml", _references("'${{{p}}}${{{p}}}'")),
    "a reference with many braces": (
        "f.yaml",
        "actor_rollout_ref: {rollout: {n: '" + "${oc.select:a," * 50_000 + "'}}",
    ),
}
"""Files with settings that are read, or refused: any exit status."""


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _linked_source(path: Path, target: str) -> None:
    (path.parent / "linked.sh").symlink_to(target)
    path.write_text("source linked.sh")
