"""The pages say what the code does, and their commands and code run."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from nemo_geomask.cli import create_parser
from nemo_geomask.config.presets import PRESETS
from nemo_geomask.losses import available, build_loss

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])
LOSSES = (DOCS / "reference" / "loss_reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [name for name, entries in available().items() if entries[0].distribution == "nemo-geomask"]
)
def test_every_objective_has_a_row(name):
    assert f"| `{name}` |" in LOSSES


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_row(preset):
    assert f"| `{preset} {{" in (DOCS / "reference" / "masks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_example_runs():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    scope = {"torch": torch}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["value"].requires_grad
    assert scope["metrics"]["geomask/mask/geometric/removed"] >= 0


def blocks(page, language):
    """Code blocks of a page in one language; the empty one for blocks that name none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose_words(text):
    """Number of words outside code blocks and tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return len(re.sub(r"^\|.*$|<!--.*?-->", "", text, flags=re.MULTILINE).split())


GUIDES = sorted([*DOCS.glob("tutorials/*.md"), *DOCS.glob("how_to/*.md")])


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_can_be_read_in_one_sitting(page):
    assert prose_words(page.read_text(encoding="utf-8")) <= 900


def test_every_page_is_in_the_table_of_contents_of_its_part():
    for part in ("tutorials", "how_to", "reference", "background"):
        (listed,) = blocks(DOCS / part / "index.md", "{toctree}")
        names = {line for line in listed.splitlines() if re.fullmatch(r"\w+", line)}
        assert names == {page.stem for page in DOCS.glob(f"{part}/*.md")} - {"index"}


def commands():
    """Every ``nemo-geomask`` command of README and pages, with its page."""
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for language in ("", "sh", "bash", "console"):
            for block in blocks(page, language):
                for line in block.replace("\\\n", " ").splitlines():
                    found = re.match(r"(?:\$ |uv run )?nemo-geomask ([^#>|]*)", line)
                    # Forms with placeholders, such as [key.path=value …], are no commands.
                    if found and not re.search(
                        r"[\[…]| \|", line.partition("#")[0].replace("'[", "").replace("=[]", "")
                    ):
                        yield pytest.param(found[1], id=f"{page.stem}: {found[1].strip()[:60]}")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_of_a_page_is_accepted(command):
    words = shlex.split(command)
    parser = create_parser(words[:1])
    with contextlib.suppress(SystemExit) if words[0] == "--version" else contextlib.nullcontext():
        _, unknown = parser.parse_known_args(words)
        # Overrides behind an option, which the command line adds to the others.
        assert [word for word in unknown if word.startswith("-") or not re.search("^~|=", word)] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "loss_fn:" in "".join(blocks(page, "yaml"))], ids=lambda page: page.stem
)
def test_a_loss_of_a_page_is_valid(page):
    for block in blocks(page, "yaml"):
        settings = yaml.safe_load(block.replace("${oc.env", "$(oc.env")).get("loss_fn") if "loss_fn:" in block else None
        if settings and "my_" not in block and "topr" not in block:
            build_loss({"name": "clipped_pg", **settings})


def test_a_loss_by_paper_is_valid_in_nemo_rls_recipes():
    text = (DOCS / "how_to" / "peers.md").read_text(encoding="utf-8")
    losses = re.findall(r"`(\{name: .*?\})`(?= \||;)|with token-level advantages `(\{.*?\})`", text)
    assert len(losses) >= 20
    for first, second in losses:
        # What examples/configs/grpo_math_1B.yaml sets.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build_loss(
                {
                    "token_level_loss": True,
                    "ratio_clip_min": 0.2,
                    "ratio_clip_max": 0.2,
                    **yaml.safe_load(first or second),
                }
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_python_of_a_page_compiles(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


TUTORIALS = [page for page in sorted(DOCS.glob("tutorials/*.md")) if blocks(page, "sh")]
# Behind a tutorial's own options, these train fewer steps on smaller batches of shorter responses, in one process.
SMALL = (
    "--steps 2 --jobs 1 env.max_terms=16 grpo.num_prompts_per_step=8 "
    "policy.train_global_batch_size=16 policy.train_micro_batch_size=16"
)
# The installed command, whose ranks are forked from a process that has done their imports.
COMMAND = f"""#!{sys.executable}
import multiprocessing, sys
from nemo_geomask.cli import main
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["nemo_geomask.testing"])
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page, tmp_path):
    """Run its blocks marked ``sh``, in order, in an empty folder, with the files that it tells the reader to write."""
    if page.stem == "nemo_rl" and "NEMO_RL_ROOT" not in os.environ:
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    text = page.read_text(encoding="utf-8")
    for name, block in re.findall(r"Save this as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name, command in (("nemo-geomask", COMMAND), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (tmp_path / "bin" / name).write_text(command, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    paths = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(DOCS.parent)}
    script = re.sub(r"^nemo-geomask lab .*", rf"\g<0> {SMALL}", "".join(blocks(page, "sh")), flags=re.MULTILINE)
    done = subprocess.run(
        [shutil.which("bash"), "-ec", script],
        cwd=tmp_path,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
