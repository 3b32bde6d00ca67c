"""What is shown of a recipe reads as what it was."""

import pytest

from nemo_geomask.yaml_text import inline_yaml

yaml = pytest.importorskip("yaml")


@pytest.mark.parametrize(
    "value",
    [
        "/runs/lr=1e-6,kl=0.001/records",
        *("null", "~", "on", "No", "YES", "y", "true", "1", "-1.5", "1e-6", "1_000", "0x1f", ".inf", "1:30"),
        *("2001-01-01", "-a", "[a]", "{a}", "*a", "&a", "!a", "%a", "@a", "'", "é"),
        *("", " x ", "a b", "a: b", "a #b", "- a", 'a"b', "a\\b", "a\nb"),
        *("module:attribute", "${oc.env:X}", "seq-mask-tis"),
        *(None, True, 0, -3, 0.5, 1e-7, 2.5e-8, 1e22),
    ],
    ids=repr,
)
def test_what_is_written_on_one_line_is_read_as_it_was(value):
    nested = {"a": [value, {"b": value}], "c": value, "on": [], "d": {}}
    for one in (value, nested):
        read = yaml.safe_load(f"x: {inline_yaml(one)}")["x"]
        assert read == one
        assert type(read) is type(one)


def test_plain_words_are_not_quoted():
    assert inline_yaml({"preset": "seq_mask-tis", "min": 0.5}) == "{preset: seq_mask-tis, min: 0.5}"
