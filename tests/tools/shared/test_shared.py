"""Tables, colours, JSON and confidence intervals."""

import json
import math
import subprocess
import sys
from statistics import fmean

import pytest

from nemo_geomask.errors import ArgumentError, MissingDependencyError
from nemo_geomask.tools.shared import palette
from nemo_geomask.tools.shared.intervals import mean_interval, percentile_interval, ratio_interval
from nemo_geomask.tools.shared.json_output import to_json
from nemo_geomask.tools.shared.terminal_tables import format_cell, format_table, print_table
from tests.helpers.interval_text import format_interval, format_mean
from tests.helpers.markdown import markdown_table, replace_marked_text


def test_a_table_aligns_its_columns():
    rows = [("a", 1.0, "x"), ("long", None, "yz")]
    assert format_table(("", "n", "text"), rows, left_aligned=(0, 2), indent=1).split("\n") == [
        "       n  text",
        " a     1  x",
        " long  –  yz",
    ]
    assert format_table(("name", "n"), []) == "name  n"


def test_cells_are_short():
    assert [format_cell(value) for value in (1 / 3, math.nan, None, 12, "text")] == ["0.3333", "–", "–", "12", "text"]


def test_a_pipe_gets_plain_text_and_an_empty_table_its_title(capsys):
    print_table("title", ("a", "b"), [("x", 2)])
    print_table("nothing recorded", (), [])
    assert capsys.readouterr().out == "\ntitle\n  a  b\n  x  2\n\nnothing recorded\n"


def test_rich_draws_on_a_terminal_without_reading_markup(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    print_table("title", ("", "[/n]"), [("[red]a[/red]", 2)])
    printed = capsys.readouterr().out
    assert "[red]a[/red]" in printed
    assert "┃ [/n] ┃" in printed
    assert "\x1b" not in printed  # the stream of a command would show it as text
    monkeypatch.setitem(sys.modules, "rich.table", None)
    print_table("title", ("", "n"), [("a", 2)])
    assert capsys.readouterr().out == "\ntitle\n     n\n  a  2\n"


def test_json_has_no_nan():
    value = {"a": math.nan, 1: [math.inf, (1.5, "x")], "b": {"c": -math.inf}}
    assert json.loads(to_json(value)) == {"a": None, "1": [None, [1.5, "x"]], "b": {"c": None}}


def test_markdown_escapes_bars_and_needs_its_markers():
    table = markdown_table(("a", "b"), [("|Δ|", "1")])
    assert table == "| a | b |\n|---|---|\n| \\|Δ\\| | 1 |"
    page = "before\n<!-- t: begin -->\nold\n<!-- t: end -->\nafter"
    assert replace_marked_text(page, "t", "new", page="p.md") == page.replace("old", "new")
    with pytest.raises(ArgumentError, match=r"p\.md: '<!-- u: begin -->' .* is missing"):
        replace_marked_text(page, "u", "new", page="p.md")


def test_lines_of_a_plot_differ():
    count = len(palette.COLOURS) * len(palette.LINE_STYLES)
    polled_output = [tuple(palette.line_look(index).values()) for index in range(count)]
    assert len(set(polled_output)) == count
    assert tuple(palette.line_look(count).values()) == polled_output[0]


def test_intervals_equal_those_by_hand():
    values = [0.1, 0.4, 0.2]
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(fmean(values))
    assert (high - low) / 2 == pytest.approx(4.3027 * 0.152753 / math.sqrt(3), rel=1e-4)
    assert mean_interval([0.1]) is None
    assert mean_interval([0.1, 0.3]) == pytest.approx((0.2 - 12.7062 * 0.1, 0.2 + 12.7062 * 0.1), rel=1e-4)
    assert percentile_interval(range(1001)) == (25, 975)
    assert all(map(math.isnan, percentile_interval([])))
    assert ratio_interval(2.0, math.log(2) / 1.959964) == pytest.approx((1.0, 4.0), rel=1e-6)
    assert all(map(math.isfinite, ratio_interval(2.0, 1e9)))
    assert all(map(math.isnan, ratio_interval(2.0, math.inf)))


def test_intervals_as_text():
    assert format_mean([]) == "–"
    assert format_mean([0.0254]) == "+0.025"
    assert format_mean([0.1, 0.3]) == "+0.200 (-1.071 to +1.471)"
    assert format_interval(None) == ""
    assert format_interval((0.25, 1.5), ".1f") == " (0.2 to 1.5)"
    assert format_interval((-0.0254, 1.0)) == " (-0.025 to +1.000)"


def test_without_scipy_the_error_names_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingDependencyError, match=r"confidence intervals need .*nemo-geomask\[diagnose\]"):
        mean_interval([0.1, 0.2])


def test_without_numpy_the_error_names_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingDependencyError, match=r"confidence intervals need .*nemo-geomask\[diagnose\]"):
        percentile_interval([1.0, 2.0])


def test_importing_them_needs_no_package():
    names = ", ".join(
        f"nemo_geomask.tools.shared.{name}" for name in ("intervals", "json_output", "palette", "terminal_tables")
    )
    code = f"import sys, {names}; print({{'numpy', 'scipy', 'rich', 'matplotlib'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
