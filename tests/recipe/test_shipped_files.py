"""Recipes, schema and pages that come with the package: listed, found by name, copied with their parents."""

from pathlib import Path

import pytest

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import load_recipe
from nemo_geomask.recipe.shipped_files import (
    copy_files,
    describe_file,
    find_recipe,
    inherited_files,
    list_files,
    select_files,
    shipped_file,
)

ROOT = Path(__file__).parents[2]
DEMO = "recipes/lab/demo.yaml"
FAMILY = ("demo", "search")


def test_every_recipe_is_listed_and_every_page_that_a_terminal_shows_complete():
    on_disk = [*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("recipes/**/*.json"), *ROOT.glob("docs/[!_]*/*.md")]
    names = {path.relative_to(ROOT).as_posix() for path in on_disk}
    assert set(list_files()) < names
    left_out = {name for name in names - set(list_files()) if Path(name).name != "index.md"}
    assert {"docs/reference/api.md", "docs/reference/command_line.md", "docs/evidence/protocol.md"} <= left_out
    for name in left_out:
        folder = name.split("/")[1]
        is_made_at_build = "<!-- site: " in (ROOT / name).read_text(encoding="utf-8")
        assert is_made_at_build or folder in ("evidence", "performance", "upstream"), name


@pytest.mark.parametrize("name", list_files())
def test_every_file_says_what_it_is(name):
    description = describe_file(name)
    assert description
    assert not description.startswith("#")


def test_a_folder_stands_for_its_files():
    selected = select_files(["recipes/llm/", "recipes/recipe.schema.json"])
    assert selected == [
        *(name for name in list_files() if name.startswith("recipes/llm/")),
        "recipes/recipe.schema.json",
    ]
    assert select_files([]) == list_files()
    with pytest.raises(ConfigError, match="recipes/ll: no file of this name"):
        select_files(["recipes/ll"])


def test_a_name_is_found_in_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(DEMO) == ROOT / DEMO
    assert load_recipe(find_recipe(DEMO))["grpo"]["max_num_steps"] == 100
    for other in ("recipes/lab/no_such.yaml", "demo.yaml", "../recipes/lab/demo.yaml", "docs/index.md", "recipes"):
        assert find_recipe(other) == Path(other)


def test_a_file_of_the_folder_comes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    copy_files([DEMO], tmp_path)
    assert find_recipe(DEMO) == Path(DEMO)


def test_a_copy_has_its_parents_and_reads_the_same(tmp_path):
    names = inherited_files([DEMO])
    assert names == [f"recipes/lab/{name}.yaml" for name in FAMILY]
    copied = copy_files(names, tmp_path)
    assert copied == [tmp_path / name for name in names]
    assert load_recipe(tmp_path / DEMO) == load_recipe(ROOT / DEMO)


def test_a_file_that_differs_is_not_overwritten(tmp_path):
    names = inherited_files([DEMO])
    copy_files(names, tmp_path)
    assert copy_files(names, tmp_path)  # the same again
    (tmp_path / names[-1]).write_text("mine", encoding="utf-8")
    (tmp_path / DEMO).unlink()
    with pytest.raises(ConfigError, match=r"search\.yaml: exists and differs from the file of nemo-geomask"):
        copy_files(names, tmp_path)
    assert (tmp_path / names[-1]).read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / DEMO).exists()


def test_an_unknown_name_is_an_error():
    with pytest.raises(ConfigError, match="`nemo-geomask recipes` lists them"):
        shipped_file("recipes/lab/../../setup.py")


def test_the_command_lists_prints_and_copies(capsys, tmp_path):
    assert main(["recipes"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list_files()
    assert main(["recipes", DEMO]) == 0
    assert capsys.readouterr().out == (ROOT / DEMO).read_text(encoding="utf-8")
    assert main(["recipes", "--copy", str(tmp_path)]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(str(tmp_path / name) for name in list_files())
    assert main(["recipes", "recipes/lab/no_such.yaml"]) == 2


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "recipes").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match="can't be written"):
        copy_files([DEMO], tmp_path)
