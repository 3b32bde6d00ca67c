"""The page is one self-contained file, and nothing from a run is interpreted by the browser as markup."""

import base64
import hashlib
import itertools
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("plotly", reason="the page embeds plotly (diagnose extra)")
pytest.importorskip("jinja2", reason="the page is a template (diagnose extra)")


from nemo_geomask.cli import main
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from nemo_geomask.tools.diagnose.report import html_report
from nemo_geomask.tools.diagnose.report.figures import MAX_POINTS, diagnosis_figures, plotly_figure
from nemo_geomask.tools.diagnose.report.html_report import short_names, write_report
from nemo_geomask.tools.diagnose.report.report_tables import diagnosis_tables
from nemo_geomask.tools.shared.palette import CONTRASTING_COLOURS
from tests.evidence.diagnose.planted_causes import planted_run, planted_step
from tests.evidence.diagnose.planted_logs import RunShape
from tests.helpers.logs import log_rows, write_log

SHAPE = RunShape(steps=6, prompts=6, samples=4)
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{7*7}}"


class Page(HTMLParser):
    """Tags, attributes, scripts and text that a browser would read."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.attributes, self.text, self.level = [], [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag == "script":
            self.scripts.append("")
        self.level = tag

    def handle_data(self, data):
        if self.level == "script":
            self.scripts[-1] += data
        elif self.level != "style":
            self.text += data

    def handle_endtag(self, tag):
        self.level = None


def run_with_masks(label="veto"):
    statistics = RunStatistics()
    for step in range(1, 7):
        block = planted_step(3, step, "tool_calls" if step > 3 else None, 20.0, shape=SHAPE)
        removed = np.random.default_rng(step).random(len(block.tokens["mask"])) < 0.1
        statistics.add(survey_block(RecordBlock(block.sequences, block.tokens, block.offsets, {label: removed})))
    return diagnose(statistics)


@pytest.fixture(scope="module")
def diagnoses():
    return [run_with_masks(HOSTILE), diagnose(planted_run(1, shape=SHAPE))]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Write the logs of a run into a folder whose name is markup, and return the folder."""
    folder = tmp_path_factory.mktemp("logs") / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    for step in (1, 2, 3):
        write_log(folder, step, list(log_rows(planted_step(0, step, "shifted", 0.5, shape=SHAPE))))
    return folder


@pytest.fixture(scope="module")
def page(diagnoses, tmp_path_factory):
    runs = [(Path(HOSTILE), diagnoses[0]), (Path("/other"), diagnoses[1])]
    path, fallbacks = tmp_path_factory.mktemp("page") / "new" / "report.html", {HOSTILE: ("unknown", HOSTILE)}
    write_report(path, runs, fallbacks=fallbacks, decode=lambda ids: HOSTILE, names=[HOSTILE, "other"])
    return Page(path.read_text(encoding="utf-8"))


def test_text_of_a_run_is_escaped(page):
    assert not {"img", "iframe", "object", "link", "base", "form"} & set(page.tags)
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count(HOSTILE) > 5
    figures = json.loads(page.scripts[0])
    for figure in figures.values():
        for trace in figure["data"]:
            assert "<" not in trace.get("name", "")
    assert any("&lt;/script&gt;" in text for text in json.dumps(figures).split('"'))


def test_names_of_environments_are_escaped(tmp_path):
    statistics = RunStatistics()
    for step in range(1, 4):
        block = planted_step(3, step, None, 0.0, shape=SHAPE)
        names = np.array([HOSTILE, "\u202ereversed\n"], dtype=object)[block.sequences["group"] % 2]
        statistics.add(survey_block(replace(block, sequences={**block.sequences, "environment": names})))
    path = tmp_path / "report.html"
    write_report(path, [(Path("/run"), diagnose(statistics))])
    page = Page(path.read_text(encoding="utf-8"))
    assert "By environment" in page.text
    assert HOSTILE in page.text
    assert "\\u202ereversed\\n" in page.text
    assert "\u202e" not in page.text
    assert "img" not in page.tags


def test_a_place_is_marked_as_such_with_its_likeliest_causes(tmp_path):
    statistics = RunStatistics()
    for step in range(1, 4):
        block = planted_step(3, step, None, 0.0, shape=SHAPE)
        is_noisy = np.repeat(block.sequences["group"] < 3, np.diff(block.offsets))
        environment = np.array(["math", "code"], dtype=object)[(block.sequences["group"] < 3).astype(int)]
        noise = np.random.default_rng(step).normal(0.0, 0.5, len(is_noisy)).astype(np.float32)
        block.tokens["prev"][:] = block.tokens["gen"] + noise * np.where(is_noisy, 1.0, 0.02).astype(np.float32)
        statistics.add(survey_block(replace(block, sequences={**block.sequences, "environment": environment})))
    diagnosis = diagnose(statistics)
    assert diagnosis.cause.is_place
    write_report(tmp_path / "x.html", [(Path("a"), diagnosis)])
    text = Page((tmp_path / "x.html").read_text(encoding="utf-8")).text
    assert "A place, not a cause. The likeliest causes:" in text
    assert all(likely in text for likely in diagnosis.cause.likely)
    assert f"To tell them apart: {diagnosis.cause.action}." in text
    (table,) = [table for table in diagnosis_tables(diagnosis) if table.key == "causes"]
    assert {row[0]: row[1] for row in table.rows}[diagnosis.cause.id] == "shown, a place"


def test_the_page_needs_no_other_file_and_allows_no_other_script(page):
    assert page.tags.count("script") == 3
    assert page.text.count("plotly.js v") == 0
    assert sum(script.count("plotly.js v") for script in page.scripts) == 1
    assert [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "data")] == []
    assert all(value.startswith("#") for tag, name, value in page.attributes if name == "href")
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in (value or "")]
    for script in page.scripts[1:]:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_every_plot_has_its_numbers_and_every_table_a_caption(page):
    figures = json.loads(page.scripts[0])
    placed = [value for _, name, value in page.attributes if name == "data-figure"]
    assert placed == list(figures)
    assert page.tags.count("table") == page.tags.count("caption")
    headings = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


def test_every_value_names_its_column_where_columns_have_no_room(page):
    """Below that width, each row of a table with many columns is a list of its cells."""
    labels = {value for _, name, value in page.attributes if name == "data-column"}
    assert {"before 4", "from 4", "all steps", "definition"} <= labels
    assert ("table", "class", "many") in page.attributes
    style = (Path(html_report.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    narrow = style[style.index("@container") :]
    assert ".many td::before { content: attr(data-column)" in narrow
    assert "container-type: inline-size" in style


def test_every_column_has_a_definition(diagnoses):
    """Columns that only identify a row, such as step or group, need none."""
    which = {"", "step", "row", "group", "token", "tokens", "since step", "ids up to it", "definition", "threshold"}
    which |= {"measured", "which is", "before", "after", "as a", "standard errors", "gen", "prev", "|Δ|", "k1"}
    which |= {"95 %", "drifting | broken", "all steps", "before 4", "from 4"}
    for table in diagnosis_tables(diagnoses[0]):
        assert set(table.columns) <= which | set(table.definitions), table.key


def test_a_curve_of_a_long_run_is_pooled():
    one_step = survey_block(planted_step(0, 1, None, 0.0, shape=RunShape(prompts=2, samples=2, length=30)))
    part = one_step.steps[1]
    steps = dict.fromkeys(range(1, 10 * MAX_POINTS + 8), part)
    diagnosis = diagnose(RunStatistics(steps=steps, tables=one_step.tables))
    for figure in diagnosis_figures([diagnosis]):
        assert all(len(curve.x) <= MAX_POINTS for curve in figure.curves), figure.key
    (k3,) = [figure.curves[0] for figure in diagnosis_figures([diagnosis]) if figure.key.endswith("mismatch_k3")]
    assert k3.y == pytest.approx([part.mean("k3")] * len(k3.y), rel=1e-12)


def test_plots_hold_the_numbers_of_the_records(diagnoses):
    figures = {figure.key: figure for figure in diagnosis_figures(diagnoses)}
    curve = figures["step geomask/mismatch_k3"].curves[1]
    steps = diagnoses[1].evidence.statistics.steps
    assert curve.y == pytest.approx([steps[step].mean("k3") for step in sorted(steps)], rel=1e-12)
    assert all(low <= y <= high for low, y, high in zip(curve.low, curve.y, curve.high, strict=True))
    for figure in figures.values():
        json.dumps(plotly_figure(figure, ["a", "b"]), allow_nan=False)


def test_a_run_is_named_by_what_differs_in_its_path(tmp_path):
    folders = [tmp_path / "a" / "records", tmp_path / "b" / "records"]
    assert short_names(folders) == ["a", "b"]
    assert short_names([tmp_path / "a" / "x", tmp_path / "a" / "y"]) == ["x", "y"]
    assert short_names([tmp_path / "a"]) == ["a"]
    assert short_names([tmp_path / "a", tmp_path / "a" / "b"]) == ["a", "b"]


def test_the_command_writes_a_report(logged, tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main(["diagnose", str(logged), "--brief", "--html", str(report)]) == 3
    out, err = capsys.readouterr()
    assert err == f"report: {report}\n"
    assert "broken" in out
    assert "img" not in Page(report.read_text(encoding="utf-8")).tags
    assert not list(tmp_path.glob("*.part"))
    assert main(["diagnose", str(logged), "--brief", "--html", str(report / "x.html")]) == 2
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("log_probs", ["the same", "none"])
def test_a_run_without_a_mismatch_has_a_page(log_probs, tmp_path):
    statistics = RunStatistics()
    for step in (1, 2, 3, 4):
        block = planted_step(0, step, None, 0.0, shape=RunShape(prompts=4, samples=4, length=40))
        block.tokens["prev"][:] = block.tokens["gen"] if log_probs == "the same" else 0.0
        statistics.add(survey_block(block))
    diagnosis = diagnose(statistics)
    write_report(tmp_path / "x.html", [(Path("a"), diagnosis)])
    text = Page((tmp_path / "x.html").read_text(encoding="utf-8")).text
    assert ("not judged" in text) == (log_probs == "none")


def test_colours_have_enough_contrast_on_both_pages():
    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in CONTRASTING_COLOURS:
        for page in ("#ffffff", "#15181c"):
            dark, light = sorted((luminance(colour), luminance(page)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, page)
    assert not math.isnan(luminance(CONTRASTING_COLOURS[0]))


def test_the_table_marks_the_numbers_that_made_the_verdict():
    def title_and_marks(diagnosis):
        table = diagnosis_tables(diagnosis)[0]
        column = table.columns.index("drifting | broken")
        return table.title, {row[0] for row in table.rows if row[column].endswith(("drifting", "broken"))}

    diagnosis = diagnose(planted_run(0, "staleness", 30.0))
    title, marked = title_and_marks(diagnosis)
    assert marked == {name for name, reading in diagnosis.readings.items() if reading.health != "healthy"} != set()
    assert title.endswith(
        "; "
        + diagnosis.health
        + " by "
        + ", ".join(name for name, reading in diagnosis.readings.items() if reading.health == diagnosis.health)
    )
    title, marked = title_and_marks(diagnose(planted_run(0, "zero_logprobs", 0.02)))
    assert not marked
    assert title.endswith("; broken by the cause or the change alone, as no number is that far beyond its limit")
    title, marked = title_and_marks(diagnose(planted_run(0)))
    assert (title, marked) == ("Numbers, Δ = prev − gen of a trained token", set())


def test_the_page_is_in_the_wheel():
    project = (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"tools/diagnose/report/page/*"' in project
