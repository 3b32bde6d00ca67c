"""Limits of what is read: each stops a hostile file early, names itself and can be raised."""

import contextlib
import os
from dataclasses import fields, replace

import pytest
import yaml

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.recipe.input_limits import (
    InputLimits,
    check_values,
    check_yaml,
    current_limits,
    load_yaml,
    parse_limits,
    parse_python,
    parse_text,
    read_source,
    read_text,
    use_limits,
)

SMALL = InputLimits(file_bytes=100, nesting=5, nodes=50, string_characters=20, number_digits=10)


def alias_bomb(levels, width=10):
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


HOSTILE_YAML = {
    "aliases": (alias_bomb(30), "nodes"),
    "many keys": ("\n".join(f"k{i}:" for i in range(20_000)), "nodes"),
    "open brackets": ("a: " + "[" * 1_000_000, "nesting"),
    "braces": ("a: " + "{a: " * 300 + "}" * 300, "nesting"),
    "long value": ("a: '" + "x" * 2_000_000 + "'", "string_characters"),
    "decimal": ("a: " + "9" * 100_000, "number_digits"),
    "base 60": ("a: 1" + ":59" * 200_000, "number_digits"),
    "tagged": ("a: !!int '1" + ":59" * 200_000 + "'", "number_digits"),
}


@pytest.mark.parametrize(("text", "name"), HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_hostile_yaml_is_refused_by_the_name_of_its_limit(text, name):
    with pytest.raises(InputLimitError, match=f"^here.*over the limit {name}; .*--limit {name}=NUMBER"):
        load_yaml(text, "here")


@pytest.mark.parametrize(
    "text", ["a: !!int x", "a: !!timestamp 2020-99-99", "a: [", "? [a]\n: 1", "a: !!bool no way", "*a"]
)
def test_any_exception_of_the_loader_is_an_error_in_the_settings(text):
    with pytest.raises(ConfigError, match="^here: not valid YAML"):
        load_yaml(text, "here")


@pytest.mark.parametrize("text", ["a: &a [1, 2]\nb: [*a, *a]", "a: 1\n---\nb: 2", "", "# nothing"])
def test_ordinary_yaml_passes(text):
    check_yaml(text, "here")


def test_an_alias_counts_what_it_repeats():
    text = "a: &a [1, 2, 3]\nb: [*a, *a]"
    # The root, two keys, the list with three values, the other list, and 2 x 4 for the aliases.
    with use_limits(replace(SMALL, nodes=16)):
        check_yaml(text, "here")
        check_values(yaml.safe_load(text), "here")
    with use_limits(replace(SMALL, nodes=15)):
        with pytest.raises(InputLimitError, match="limit nodes"):
            check_yaml(text, "here")
        with pytest.raises(InputLimitError, match="limit nodes"):
            check_values(yaml.safe_load(text), "here")


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (nested(5), None),
        (nested(6), "nesting"),
        (nested(100_000), "nesting"),
        ({"a": "x" * 20}, None),
        ({"a": "x" * 21}, "string_characters"),
        ({"x" * 21: 1}, "string_characters"),
        (b"x" * 21, "string_characters"),
        (10**9, None),
        (-(10**12), "number_digits"),
        ([0] * 49, None),
        ([0] * 50, "nodes"),
    ],
)
def test_values_are_held_to_each_limit(value, name):
    expected = pytest.raises(InputLimitError, match=f"limit {name}") if name else contextlib.nullcontext()
    with use_limits(SMALL), expected:
        check_values(value, "here")


def test_a_parser_that_recurses_too_deeply_reports_the_nesting():
    import json

    with pytest.raises(InputLimitError, match="limit nesting"):
        parse_text(json.loads, "[" * 100_000 + "]" * 100_000, "here", format_name="JSON")
    with pytest.raises(InputLimitError, match="limit number_digits"):
        parse_text(json.loads, "9" * 5000, "here", format_name="JSON")
    with pytest.raises(ConfigError, match="here: not valid JSON: Expecting value"):
        parse_text(json.loads, "[", "here", format_name="JSON")


def test_a_parser_that_runs_out_of_memory_is_an_error():
    def parse(text):
        raise MemoryError

    with pytest.raises(InputLimitError, match="^here: the memory does not suffice to read it as YAML$"):
        parse_text(parse, "a: 1", "here", format_name="YAML")


def test_an_anchor_that_contains_itself_is_refused_before_values_are_built():
    with pytest.raises(InputLimitError, match=r"^here:1: .*over the limit nesting"):
        check_yaml("a: &a [1, *a]", "here")


def test_a_loader_without_libyaml_that_recurses_too_deeply_reports_the_nesting(monkeypatch):
    def parse(text, Loader):
        raise RecursionError

    monkeypatch.setattr(yaml, "parse", parse)
    with pytest.raises(InputLimitError, match="^here.*over the limit nesting"):
        check_yaml("a: 1", "here")


@pytest.mark.parametrize("text", ["a\0b", "-" * 100_000 + "1"], ids=["null character", "nesting"])
def test_whatever_python_can_not_parse_is_a_syntax_error(text):
    with pytest.raises(SyntaxError):
        parse_python(text)


def test_source_that_is_no_text_is_an_error_and_missing_source_is_empty(tmp_path):
    assert read_source(tmp_path / "missing.py") == ""
    (tmp_path / "binary.py").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"binary\.py: is no Python source: "):
        read_source(tmp_path / "binary.py")


def test_a_file_is_read_to_its_limit_only(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"a: 1\r\n" + b"#" * 94)
    with use_limits(SMALL):
        assert read_text(path).startswith("a: 1\n#")
        path.write_bytes(b"#" * 101)
        with pytest.raises(InputLimitError, match=r"more than 100 bytes \(101 or more here\).*limit file_bytes"):
            read_text(path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputLimitError, match="is a FIFO, not a regular file"):
        read_text(tmp_path / "fifo")
    with pytest.raises(InputLimitError, match="is a character device"):
        read_text("/dev/zero")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(InputLimitError, match="is a character device"):
        read_text(tmp_path / "link")
    for path, error in [(tmp_path, IsADirectoryError), (tmp_path / "no", FileNotFoundError), ("a\0b", OSError)]:
        with pytest.raises(error):
            read_text(path)


def test_limits_are_raised_for_the_process_by_name(tmp_path):
    raised = parse_limits(["nodes=30_000", "nesting=200"])
    assert raised == replace(InputLimits(), nodes=30_000, nesting=200)
    with use_limits(raised):
        assert current_limits() == raised
        check_yaml("a: " + "[" * 150 + "]" * 150, "here")
    assert current_limits() == InputLimits()
    with pytest.raises(InputLimitError):
        check_yaml("a: " + "[" * 150 + "]" * 150, "here")


@pytest.mark.parametrize("word", ["depth=3", "nodes", "nodes=", "nodes=0", "nodes=-1", "nodes=1e9", "nodes=²"])
def test_a_limit_that_is_none_is_refused(word):
    with pytest.raises(ConfigError, match=f"--limit {word}"):
        parse_limits([word])


@pytest.mark.parametrize("name", [limit.name for limit in fields(InputLimits)])
def test_every_limit_has_its_sentence(name):
    from nemo_geomask.recipe.input_limits import limit_error

    message = str(limit_error(name, "here", 10**7))
    assert f"{getattr(InputLimits(), name):,}" in message
    assert "10,000,000 or more here" in message
