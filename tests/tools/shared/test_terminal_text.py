"""Text of others reaches a terminal without the power to change what is around it."""

import io
import json
import sys

import pytest

from nemo_geomask.tools.shared.terminal_text import (
    EscapingStream,
    escape_json,
    escape_line,
    escape_lines,
    escaped_output,
)

HOSTILE = {
    "ESC": ("a\x1b[2Jb", r"a\x1b[2Jb"),
    "C1": ("a\x9b31mb", r"a\x9b31mb"),
    "bell": ("\a", r"\x07"),
    "carriage return": ("safe\rforged", r"safe\rforged"),
    "line break": ("a\nerror", r"a\nerror"),
    "tab": ("a\tb", r"a\tb"),
    "null": ("\0", r"\x00"),
    "delete": ("\x7f", r"\x7f"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "right-to-left override": ("a\u202eb", r"a\u202eb"),
    "isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "zero width": ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
    "tag characters": ("\U000e0041", r"\U000e0041"),
    "byte of no encoding": ("\udcff", r"\udcff"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_a_control_character_is_shown_as_an_escape(text, shown):
    assert escape_line(text) == shown
    assert escape_line(text).isprintable()


@pytest.mark.parametrize(
    "text", ["", "plain text", "π_old ≤ 0.2 · Δ", "naïve 漢字 عربى", "a\u00a0b\u3000c", r"C:\new", "😀"]
)
def test_other_text_stays(text):
    assert escape_line(text) == escape_lines(text) == text
    assert json.loads(escape_json(json.dumps(text, ensure_ascii=False))) == text


def test_a_line_break_begins_no_line_of_ours():
    assert escape_lines("first\nnemo-geomask: error\x1b") == "first\n  nemo-geomask: error\\x1b"


@pytest.mark.parametrize("text", [text for text, _ in HOSTILE.values()], ids=HOSTILE)
def test_json_is_escaped_without_loss(text):
    for value in ({text: [text]}, {text: [text, "漢字"]}):
        escaped = escape_json(json.dumps(value, ensure_ascii=False, indent=2))
        assert json.loads(escaped) == value
        assert ("漢字" in escaped) == ("漢字" in str(value))
        assert escaped.replace("\n", "").isprintable()


def test_a_stream_escapes_all_but_line_breaks_and_tabs():
    raw = io.StringIO()
    stream = EscapingStream(raw)
    assert stream.write("a\x1b\n") == 3
    stream.writelines(["b\r", "\tc"])
    print("d\u202e", file=stream)
    assert raw.getvalue() == "a\\x1b\nb\\r\tcd\\u202e\n"
    assert stream.getvalue() == raw.getvalue()


def test_both_streams_are_escaped_within_the_context_only(capsys):
    before = sys.stdout, sys.stderr
    with escaped_output():
        print("a\x1b")
        print("b\x9b", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("a\\x1b\n", "b\\x9b\n")


def test_a_process_without_streams_and_a_replaced_one_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    other = io.StringIO()
    with escaped_output():
        assert sys.stdout is None
        monkeypatch.setattr(sys, "stderr", other)
    assert sys.stderr is other
