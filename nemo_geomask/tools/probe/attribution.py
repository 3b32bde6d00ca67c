"""Attribution of the mismatch to switches: the order in which arms are tried, and the ledger that they give.

All conservative values of a side are tried at once first. A side whose values change nothing together is not split;
else groups of switches are tried, and the single switches of the groups that change something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_geomask.tools.probe.arm_runner import NOTHING, SIDES, Arm, ArmRunner, Side
from nemo_geomask.tools.probe.gap_statistics import Gap, GapChange, change_between, gap
from nemo_geomask.tools.probe.ledger import NEGLIGIBLE_K3, SIGNIFICANT, Ledger, LedgerRow, verdict_of
from nemo_geomask.tools.probe.paired_tests import holm
from nemo_geomask.tools.probe.scored_arms import BASE
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch

_TOP = 3
"""Number of switches that are examined further: on fresh prompts, and as the last one missing."""


def attribute_mismatch(
    runner: ArmRunner,
    switches: Sequence[MismatchSwitch],
    values: Mapping[str, Any],
    untried_rows: Sequence[LedgerRow] = (),
    replaced: Mapping[str, Any] | None = None,
) -> Ledger:
    """Run the arms that are needed, and return the ledger.

    Args:
        replaced: the recipe's own values of those keys that have another one here.
    """
    return _Search(runner, switches, values, replaced or {}).ledger(untried_rows)


class _Search:
    """Search for the switches behind a mismatch."""

    def __init__(
        self,
        runner: ArmRunner,
        switches: Sequence[MismatchSwitch],
        values: Mapping[str, Any],
        replaced: Mapping[str, Any],
    ) -> None:
        self._runner = runner
        self._switches = switches
        self._values = values
        self._replaced = replaced
        self._explored = ~runner.tokens.is_fresh
        self._prompts = runner.tokens.prompts

    def ledger(self, untried_rows: Sequence[LedgerRow]) -> Ledger:
        """Run the arms and return the ledger."""
        self._runner.run_repeated()
        self._floor = self._largest_repetition()
        # Where engines are replaced in their process, the trainer's arms come first: each of them ends that process.
        for sides in ((side,) for side in reversed(SIDES)) if self._runner.replaces_engines else (SIDES,):
            self._run(self._groups_that_matter, sides)
            self._run(self._singles, sides)
        rows = self._judged([self._row(switch) for switch in self._switches])
        rows = self._examined(rows)
        rows.sort(key=_by_share)
        runner = self._runner
        every = [runner.arm_of_all(side) for side in SIDES]
        has_all = runner.has_delta(every[0], every[1])
        return Ledger(
            baseline=self._gap(NOTHING, NOTHING),
            triangle=self._triangle(),
            floor=self._floor,
            repetitions={name: gap(*pair) for name, pair in runner.repetitions().items()},
            all_conservative=self._gap(*every) if has_all and any(every) else None,
            rows=(*rows, *untried_rows),
            prompts=len(set(self._prompts[self._explored].tolist())),
            starts=len(runner.starts),
            is_complete=runner.is_complete,
        )

    def _triangle(self) -> dict[str, Gap]:
        """Return the gaps between decode, prefill and trainer, and the last one by who sampled the tokens."""
        runner, tokens = self._runner, self._runner.tokens
        trainer, decode, prefill = map(
            tokens.signed, (runner.logprobs(NOTHING), runner.decode(NOTHING), runner.prefill())
        )
        gaps = {
            "decode and prefill": gap(decode, prefill),
            "prefill and trainer": gap(trainer, prefill),
            "decode and trainer": gap(trainer, decode),
        }
        for name, chosen in (("engine", ~tokens.by_trainer), ("trainer", tokens.by_trainer)):
            if tokens.by_trainer.any() and chosen.any():
                gaps[f"decode and trainer, sampled by the {name}"] = gap(trainer[chosen], decode[chosen])
        return gaps

    def _run(self, arms_of: Callable[[Side], list[Arm]], sides: tuple[Side, ...] = SIDES) -> None:
        self._runner.run(*(arms_of(side) if side in sides else [] for side in SIDES))

    def _groups_that_matter(self, side: Side) -> list[Arm]:
        return self._groups(side) if self._matters(side, self._runner.arm_of_all(side)) else []

    def _groups(self, side: Side) -> list[Arm]:
        members: dict[str, list[str]] = {}
        for switch in self._switches:
            if switch.side == side and switch.cost != "request":
                members.setdefault(switch.group, []).append(switch.id)
        return [frozenset(ids) for ids in members.values()]

    def _singles(self, side: Side) -> list[Arm]:
        """Return the switches that groups leave open: those of groups that matter, and those that may not be read."""
        runner = self._runner
        groups = [group for group in self._groups(side) if len(group) > 1 and runner.was_run(side, group)]
        singles = [frozenset({name}) for group in groups if self._matters(side, group) for name in sorted(group)]
        every = runner.arm_of_all(side)
        if runner.replaces_engines and side == "engine" and runner.has_scores(side, every):
            of_side = (switch for switch in self._switches if switch.side == side and switch.cost != "request")
            singles += [frozenset({switch.id}) for switch in of_side if runner.is_shown(switch, every) is None]
        return singles

    def _gap(self, engine: Arm, trainer: Arm) -> Gap:
        delta = self._runner.delta(engine, trainer)[self._explored]
        return gap(delta, delta * 0.0)

    def _change(self, before: Any, after: Any, *, fresh: bool = False) -> GapChange:
        chosen = self._runner.tokens.is_fresh if fresh else self._explored
        return change_between(before[chosen], after[chosen], self._prompts[chosen])

    def _largest_repetition(self) -> float:
        """Return the largest change of k3 that a repetition of the baseline makes."""
        runner = self._runner
        base = runner.delta(NOTHING, NOTHING)
        changes = [0.0]
        for name, (first, again) in runner.repetitions().items():
            sign = -1.0 if name.startswith("engine") else 1.0
            change = self._change(base, base + runner.tokens.signed(sign * (again - first)))
            changes.append(max(abs(change.low), abs(change.high)))
        return max(changes)

    def _matters(self, side: Side, arm: Arm) -> bool:
        """Return True if an arm changes the mismatch, beside the other side's baseline or another of its arms."""
        runner = self._runner
        if not arm or not runner.was_run(side, arm):
            return False
        if runner.error(side, arm):
            return True  # not known: its parts may work
        if not runner.differences(side, arm):
            return False
        other: Side = "trainer" if side == "engine" else "engine"
        # An arm may matter only once the other side is conservative.
        for other_arm in runner.scored_arms(other):
            before, after = (_pair(side, each, other_arm) for each in (NOTHING, arm))
            if runner.has_delta(*before) and runner.has_delta(*after):
                change = self._change(runner.delta(*before), runner.delta(*after))
                if max(abs(change.low), abs(change.high)) > max(self._floor, NEGLIGIBLE_K3):
                    return True
        return False

    # Rows

    def _row(self, switch: MismatchSwitch) -> LedgerRow:
        """Return the row of a switch, with its change and without its verdict."""
        recipe = {**self._values, **self._replaced}
        also = {
            key: value for key, value in {**switch.kept(recipe), **switch.settings(recipe)}.items() if key != switch.key
        }
        ran = self._values.get(switch.key) if switch.key in self._replaced else None
        row = LedgerRow(switch, recipe.get(switch.key), "undecided", ran=ran, also=also)
        if switch.cost == "request":
            return self._request_row(row)
        if switch.side == "both":
            return replace(row, verdict="not tried", note="changes both sides at once")
        runner, side = self._runner, switch.side
        single = frozenset({switch.id})
        own_group = next(group for group in self._groups(side) if switch.id in group)
        arm = next((arm for arm in (single, own_group, runner.arm_of_all(side)) if runner.was_run(side, arm)), None)
        if arm is None:
            return replace(row, verdict="not tried", note="the budget was spent")
        if runner.error(side, arm):
            note = runner.error(side, arm).strip().splitlines()[0][:200]
            return replace(row, verdict="not testable here", note=f"NeMo-RL could not be started with it: {note}")
        differences = runner.differences(side, arm)
        if not differences:
            return replace(row, verdict="not effective", note="nothing that ran differs from the baseline")
        is_shown = runner.is_shown(switch, arm)
        if is_shown is False:
            return replace(row, verdict="not effective", note="what ran has the same value as the baseline")
        if arm != single and self._matters(side, arm):
            return replace(row, verdict="not tried", note="the budget was spent")
        note = ""
        if arm != single:
            note = f"with {', '.join(sorted(arm - single))}, which together change nothing"
            if is_shown is None:
                # It may have been ignored: that it has no effect is not known.
                return replace(row, verdict="not tried", note=f"{note}; what ran does not show whether it was read")
        return self._with_change(replace(row, note=note, differences=differences), runner.delta(*_pair(side, arm)))

    def _request_row(self, row: LedgerRow) -> LedgerRow:
        runner, switch = self._runner, row.switch
        differences: dict[str, tuple[str, str]] = {}
        for side in _sides_of(switch):
            differences |= runner.request_differences(side, switch.id)
        if not differences:
            return replace(row, verdict="not effective", note="nothing that ran differs from the baseline")
        return self._with_change(replace(row, differences=differences), self._requested(switch))

    def _requested(self, switch: MismatchSwitch) -> Any:
        """Return the mismatch with the requests of a switch, on each side that it changes.

        A temperature T that both sides have divides the differences of logits, those of rounding too, and 1 in its
        place would hide them; so the mismatch at 1 is divided by T. If one side does not have it, nothing is divided.
        """
        requests = {side: switch.id if side in _sides_of(switch) else BASE for side in SIDES}
        logprobs = self._runner.logprobs(NOTHING, requests["trainer"])
        delta = self._runner.tokens.signed(logprobs - self._runner.decode(NOTHING, requests["engine"]))
        temperature = self._values.get(switch.key) if switch.id == "temperature" else None
        if isinstance(temperature, int | float) and temperature and self._changes_both_sides(switch):
            return delta / temperature
        return delta

    def _changes_both_sides(self, switch: MismatchSwitch) -> bool:
        """Return True if the request of a switch changes the scores of each side by more than is negligible."""
        runner = self._runner
        pairs = [(read(NOTHING), read(NOTHING, switch.id)) for read in (runner.decode, runner.logprobs)]
        return all(gap(*pair).k3 > max(self._floor, NEGLIGIBLE_K3) for pair in pairs)

    def _with_change(self, row: LedgerRow, after: Any) -> LedgerRow:
        before = self._runner.delta(NOTHING, NOTHING)
        change = self._change(before, after)
        baseline = self._gap(NOTHING, NOTHING).k3
        zero = after[self._explored] * 0.0
        share = -change.value / baseline if baseline > 0 else None
        return replace(row, after=gap(after[self._explored], zero), change=change, share=share)

    def _judged(self, rows: list[LedgerRow]) -> list[LedgerRow]:
        baseline = self._gap(NOTHING, NOTHING).k3
        changed = [row for row in rows if row.change is not None]
        adjusted = holm([row.change.p for row in changed if row.change is not None])
        by_id = {row.switch.id: p for row, p in zip(changed, adjusted, strict=True)}
        judged = []
        for row in rows:
            if row.change is not None:
                p = by_id[row.switch.id]
                verdict = verdict_of(row.change, p, baseline, self._floor)
                is_group = bool(row.note)
                row = replace(row, adjusted_p=p, verdict="no effect" if is_group else verdict)
            judged.append(row)
        return judged

    # The switches with the largest shares

    def _examined(self, rows: list[LedgerRow]) -> list[LedgerRow]:
        """Return the rows with what is known of the top ones: fresh prompts, and the last one missing."""
        runner = self._runner
        open_rows = [row for row in rows if row.verdict == "undecided" and (row.share or 0.0) > 0]
        culprits = [row for row in rows if row.verdict in ("explains", "contributes")]
        top = [*sorted(culprits, key=_by_share), *sorted(open_rows, key=_by_share)][:_TOP]
        restarted = [row.switch for row in top if row.switch.cost != "request"]
        self._run(lambda side: [runner.arm_of_all(side) - {switch.id} for switch in restarted if switch.side == side])
        for switch in restarted:
            runner.run_together(*self._arms_without(switch))
        backs = {switch.id: self._back(switch) for switch in restarted}
        measured = {id: back for id, back in backs.items() if back is not None}
        adjusted = dict(zip(measured, holm([back.p for back in measured.values()]), strict=True))
        examined = []
        for row in rows:
            back = measured.get(row.switch.id)
            if back is not None:
                row = replace(row, last_share=back.value / self._gap(NOTHING, NOTHING).k3)
                row = self._with_back(row, back, adjusted[row.switch.id])
            is_culprit = row.verdict in ("explains", "contributes") and any(row.switch == each.switch for each in top)
            confirmed = self._is_confirmed(row) if is_culprit else None
            examined.append(replace(row, is_confirmed=confirmed))
        return examined

    def _with_back(self, row: LedgerRow, back: GapChange, adjusted_p: float) -> LedgerRow:
        """Return an undecided row as one that contributes, if without its value a mismatch comes back."""
        negligible = max(self._floor, NEGLIGIBLE_K3)
        if row.verdict != "undecided" or back.low <= negligible or adjusted_p >= SIGNIFICANT:
            return row
        note = "beside the other conservative values; alone, its change is not significant"
        return replace(row, verdict="contributes", note=note)

    def _arms_without(self, switch: MismatchSwitch) -> tuple[Arm, Arm]:
        """Return the arms of both sides with all conservative values but this switch's."""
        engine, trainer = (self._runner.arm_of_all(side) - {switch.id} for side in SIDES)
        return engine, trainer

    def _back(self, switch: MismatchSwitch, *, fresh: bool = False) -> GapChange | None:
        """Return the change of k3 if, of all conservative values, only this switch gets the recipe's value back."""
        runner = self._runner
        every, missing = (
            (runner.arm_of_all("engine"), runner.arm_of_all("trainer")),
            self._arms_without(switch),
        )
        if not runner.has_delta(*every) or not runner.has_delta(*missing):
            return None
        return self._change(runner.delta(*every), runner.delta(*missing), fresh=fresh)

    def _is_confirmed(self, row: LedgerRow) -> bool:
        """Return True if the fresh prompts show a change with the same sign and an interval without 0."""
        runner, switch = self._runner, row.switch
        if switch.cost == "request":
            after = self._requested(switch)
        elif row.note:
            back = self._back(switch, fresh=True)
            return back is not None and back.low > 0
        else:
            after = runner.delta(*_pair(switch.side, frozenset({switch.id})))
        return self._change(runner.delta(NOTHING, NOTHING), after, fresh=True).high < 0


def _sides_of(switch: MismatchSwitch) -> tuple[Side, ...]:
    return SIDES if switch.side == "both" else (switch.side,)


def _pair(side: str, arm: Arm, other_arm: Arm = NOTHING) -> tuple[Arm, Arm]:
    """Return an arm of a side, and one of the other side, as arms of the engine and of the trainer."""
    return (arm, other_arm) if side == "engine" else (other_arm, arm)


def _by_share(row: LedgerRow) -> float:
    return -(row.share or 0.0)
