"""The pages say what the code does: links lead somewhere, and settings, code and commands are accepted."""

import functools
import glob
import os
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from nemo_geomask.cli import COMMANDS, create_parser, main
from nemo_geomask.losses import build_loss

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"
# Without folders such as _parts, which make site writes.
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted([*DOCS.glob("*.md"), *DOCS.glob("[!_]*/**/*.md"), *DOCS.parent.glob("*.md")])
}


def blocks(text, language):
    """Code blocks in one language; the empty one for blocks that name none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page):
    """Names of a page that a link may end with: those of its headings, and of generated tables."""
    text = PAGES[page]
    parts = re.findall(r"<!-- site: (\w+) -->", text)
    if parts:
        from tests.pages.__main__ import SITE  # imports the tools, which a link to another page does not need

        text += "\n".join(SITE[part]() for part in parts)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    return {*headings, *re.findall(r'<a id="([^"]+)">', text)}


def test_every_link_leads_to_a_file_and_an_anchor_that_is_there():
    broken = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_every_page_is_in_the_table_of_contents_of_its_part():
    for part in ("tutorials", "how_to", "reference", "background"):
        (listed,) = blocks(PAGES[DOCS / part / "index.md"], "{toctree}")
        names = {line for line in listed.splitlines() if re.fullmatch(r"\w+", line)}
        assert names == {page.stem for page in DOCS.glob(f"{part}/*.md")} - {"index"}


def test_tutorials_and_guides_can_be_read_in_one_sitting():
    words = {}
    for page in [*DOCS.glob("tutorials/*.md"), *DOCS.glob("how_to/*.md")]:
        prose = re.sub(r"^```.*?^```$|^\|.*?$|<!--.*?-->", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
        words[page.name] = len(prose.split())
    assert {name: count for name, count in words.items() if count > 900} == {}


def test_every_yaml_block_is_valid_and_so_is_its_loss():
    losses = 0
    for text in PAGES.values():
        for block in blocks(text, "yaml"):
            content = yaml.safe_load(block.replace("${oc.env", "$(oc.env"))
            settings = content.get("loss_fn") if isinstance(content, dict) else None
            # A block with a plugin of the reader's own is built where that plugin is.
            if settings and "my_" not in block and "topr" not in block:
                build_loss({"name": "clipped_pg", **settings})
                losses += 1
    assert losses >= 10


def test_a_loss_by_paper_is_valid_in_nemo_rls_recipes():
    text = PAGES[DOCS / "how_to" / "peers.md"]
    losses = re.findall(r"`(\{name: .*?\})`(?= \||;)|with token-level advantages `(\{.*?\})`", text)
    assert len(losses) >= 20
    for first, second in losses:
        # What examples/configs/grpo_math_1B.yaml sets.
        inherited = {"token_level_loss": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build_loss({**inherited, **yaml.safe_load(first or second)})


def test_every_python_block_compiles():
    for page, text in PAGES.items():
        for block in blocks(text, "python"):
            compile(block, str(page), "exec")


def test_the_example_of_the_readme_runs():
    (example,) = blocks(PAGES[README], "python")
    scope = {"torch": torch}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["value"].requires_grad
    assert scope["metrics"]["geomask/mismatch_k3"] > 0


def commands(text):
    """Arguments of every ``nemo-geomask`` command in the code blocks of a page."""
    for language in ("", "sh", "bash", "console"):
        for block in blocks(text, language):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.match(r"(?:\$ |uv run )?nemo-geomask ([^#>|]*)", line)
                # Forms with placeholders, such as [key.path=value …], are no commands.
                form = line.partition("#")[0].replace("'[", "").replace("=[]", "")
                if command and not re.search(r"[\[…]| \|", form):
                    yield shlex.split(command[1])


def test_every_command_of_the_pages_is_accepted():
    names = {command.name for command in COMMANDS}
    parser_of = functools.cache(lambda name: create_parser([name]))
    refused, accepted = [], 0
    for page, text in PAGES.items():
        for words in commands(text):
            if words == ["--version"]:
                continue
            if words[0] not in names:
                refused.append((page.name, words))
                continue
            try:
                _, unknown = parser_of(words[0]).parse_known_args(words)
            except SystemExit:
                refused.append((page.name, words))
                continue
            # Overrides behind an option, which the command line adds to the others.
            if any(word.startswith("-") or not re.search("^~|=", word) for word in unknown):
                refused.append((page.name, words))
            accepted += 1
    assert refused == []
    assert accepted > 60


@pytest.mark.slow
@pytest.mark.skipif("NEMO_RL_ROOT" not in os.environ, reason="needs a NeMo-RL checkout: NEMO_RL_ROOT")
def test_what_the_pages_add_to_a_recipe_is_no_mistake_in_nemo_rls_own(tmp_path, capsys):
    """Overrides that the pages name a loss with, and their recipes that inherit from one of NeMo-RL's."""
    own = Path(os.environ["NEMO_RL_ROOT"], "examples", "configs")
    recipes = ["grpo_math_1B", "grpo_math_8B_megatron", "recipes/llm/grpo-qwen3-1.7b-1n8g-megatron-eagle3"]
    calls, written = [], []
    for page, text in PAGES.items():
        spans = re.findall(r"`([^`\n]*\+\+loss_fn\.name=[^`\n]*)`", text)
        calls += [[*(str(own / f"{recipe}.yaml") for recipe in recipes), *shlex.split(span)] for span in spans]
        for block in blocks(text, "yaml"):
            if re.search(r"^defaults: \$\{oc.env:NEMO_RL_ROOT.*yaml$", block, re.MULTILINE):
                written.append(tmp_path / f"{page.stem}.yaml")
                written[-1].write_text(block, encoding="utf-8")
    assert len(calls) >= 2
    assert len(written) >= 2
    for words in [*calls, list(map(str, written))]:
        assert main(["check", *words]) < 2, (words, capsys.readouterr().out)


TUTORIALS = {page.stem: page for page in sorted(DOCS.glob("tutorials/*.md")) if blocks(PAGES[page], "sh")}
# The one that trains and compiles takes half a minute.
LONG = {"without_gpu"}
# Behind a tutorial's own options, these train fewer steps on smaller batches of shorter responses, in one process.
SMALL = (
    "--steps 2 --jobs 1 env.max_terms=16 grpo.num_prompts_per_step=8 "
    "policy.train_global_batch_size=16 policy.train_micro_batch_size=16"
)


def exit_status(words):
    """Run a command line of a tutorial in this process, and return the exit status."""
    program, *arguments = words
    try:
        if program == "nemo-geomask":
            return main([*arguments, *SMALL.split()] if arguments[0] == "lab" else arguments)
        assert (program, arguments[0]) == ("python", "-m")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in TUTORIALS]
)
def test_a_tutorial_can_be_followed(name, tmp_path, monkeypatch, capfd):
    """Run its blocks marked ``sh``, in order, in an empty folder, with the files that it tells the reader to write."""
    if name == "nemo_rl" and "NEMO_RL_ROOT" not in os.environ:
        pytest.skip("needs a NeMo-RL checkout: NEMO_RL_ROOT")
    monkeypatch.chdir(tmp_path)
    text = PAGES[TUTORIALS[name]]
    for file, block in re.findall(r"Save this as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        Path(file).write_text(block, encoding="utf-8")
    loaded = set(sys.modules)
    for line in "".join(blocks(text, "sh")).splitlines():
        command, _, status = line.partition(" || test $? = ")
        words = [match for word in shlex.split(command) for match in (sorted(glob.glob(word)) or [word])]
        assert exit_status(words) == int(status.partition("#")[0] or 0), (line, capfd.readouterr())
    for module in set(sys.modules) - loaded:  # the reader's own, whose name another test may use
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[module]
