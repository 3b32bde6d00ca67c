"""How mutants are counted, and whether what the configuration names is there."""

from __future__ import annotations

import pytest

from tests.mutation.__main__ import ROOT
from tests.mutation.score import Argument, Elsewhere, Equivalent, Exempt, Mutant, Score, read_equivalents, read_rooms

DIFF = "--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n def f(x):\n-    return x < 0\n+    return x <= 0\n"
LISTED = Exempt([Equivalent("a.py", "return x < 0", "return x <= 0", "x is never 0")], [], [])
NOTHING = Exempt([], [], [])


def test_survivors_count_unless_they_are_listed():
    outcomes = [
        Mutant("f_1", "a.py", "killed"),
        Mutant("f_2", "a.py", "timeout"),
        Mutant("f_3", "a.py", "survived", DIFF),
        Mutant("f_4", "a.py", "no tests", DIFF.replace("<= 0", "> 0")),
    ]
    score = Score("room", 40, outcomes)
    assert [mutant.name for mutant in score.survivors(NOTHING)] == ["f_3", "f_4"]
    assert score.summary(NOTHING) == "room: 2 of 4 noticed (50.0%); 0 equivalent; 4 of 40 mutants tested"
    assert [mutant.name for mutant in score.survivors(LISTED)] == ["f_4"]
    assert score.summary(LISTED) == "room: 2 of 3 noticed (66.7%); 1 equivalent; 4 of 40 mutants tested"
    # The same change in another file is another change.
    assert [mutant.name for mutant in score.survivors(Exempt([LISTED.changes[0]._replace(file="b.py")], [], []))] == [
        "f_3",
        "f_4",
    ]
    assert Score("room", 0, []).summary(NOTHING) == "room: 0 of 0 noticed (none); 0 equivalent; 0 of 0 mutants tested"


@pytest.mark.parametrize("room", read_rooms())
def test_what_a_room_names_is_there(room):
    settings = read_rooms()[room]
    for pattern in settings["sources"]:
        assert list(ROOT.glob(pattern)), pattern
    for path in settings["tests"]:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("entry", read_equivalents().changes, ids=lambda entry: entry.becomes)
def test_a_listed_change_is_still_one_of_the_source(entry):
    assert " ".join(entry.was.split()) in " ".join((ROOT / entry.file).read_text(encoding="utf-8").split())
    assert entry.was != entry.becomes
    assert entry.reason


@pytest.mark.parametrize("entry", read_equivalents().functions, ids=lambda entry: entry.function)
def test_a_listed_function_is_there(entry):
    name = entry.function.rpartition(".")[2]
    assert ("def " if name == "*" else f"def {name}(") in (ROOT / entry.file).read_text(encoding="utf-8")
    assert entry.reason


def change(was, becomes, name="p.m.x_f__mutmut_1"):
    return Mutant(name, "a.py", "survived", f"--- a.py\n+++ a.py\n@@ -1 +1 @@\n-    {was}\n+    {becomes}\n")


@pytest.mark.parametrize(
    ("was", "becomes", "is_equivalent"),
    [
        ("x = zeros(3, device=y.device)", "x = zeros(3, device=None)", True),
        ("x = zeros(3, device=y.device)", "x = zeros(3, )", True),
        ("x = zeros(3, device=y.device)", "x = zeros(4, device=y.device)", False),
        ("x = zeros(3, dtype=int, device=y.device)", "x = zeros(3, dtype=None, device=y.device)", False),
        ("for a in zip(b, c, strict=True):", "for a in zip(b, c, strict=False):", True),
        ("for a in zip(b, c, strict=True):", "for a in zip(b, None, strict=True):", False),
        ("b, c, strict=True", "b, c, strict=False", True),
        ("b, c, strict=True", "b, c,", True),
        ("b, c, strict=True", "b, None, strict=True", False),
        ("x.to(device, non_blocking=True)", "x.to(device, )", True),
    ],
)
def test_some_arguments_play_no_part(was, becomes, is_equivalent):
    exempt = Exempt([], [], [Argument(name, "…") for name in ("device", "non_blocking", "strict")])
    assert change(was, becomes).is_equivalent(exempt) == is_equivalent


def test_functions_that_do_not_run_here_play_no_part():
    exempt = Exempt([], [Elsewhere("a.py", "f", "…"), Elsewhere("a.py", "Class.g", "…")], [])
    assert change("a", "b").is_equivalent(exempt)
    assert change("a", "b", "p.m.xǁClassǁg__mutmut_3").is_equivalent(exempt)
    assert not change("a", "b", "p.m.xǁOtherǁg__mutmut_3").is_equivalent(exempt)
    assert not change("a", "b", "p.m.x_g__mutmut_3").is_equivalent(exempt)
    assert change("a", "b", "p.m.x_g__mutmut_3").is_equivalent(Exempt([], [Elsewhere("a.py", "*", "…")], []))
    assert not change("a", "b", "p.m.x_g__mutmut_3").is_equivalent(Exempt([], [Elsewhere("b.py", "*", "…")], []))
