"""Arms of both sides: which starts score them, and their log-probs.

The decode of an engine depends on the engine's settings, and the log-probs of a trainer on the trainer's. Any arm of
one side can therefore be compared with any of the other. One start scores an arm of each side; or, where engines can be
replaced in their process, the trainer's arms have starts of their own, and those of the engine share one. An exception
are trainers whose arms send other weights, if only rounded in another way: :attr:`ArmRunner.is_coupled` says so, and
arms of both sides then need starts together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nemo_geomask.errors import EngineError
from nemo_geomask.tools.probe.ledger import OTHER_ORDER
from nemo_geomask.tools.probe.locations import LayerDifferences, layer_differences
from nemo_geomask.tools.probe.scored_arms import BASE, FrozenTokens, differing_settings
from nemo_geomask.tools.probe.start_store import Start, StartAnswer, StartStore
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch

Side = Literal["engine", "trainer"]
SIDES: tuple[Side, Side] = ("engine", "trainer")

Arm = frozenset[str]
"""Ids of the switches of one side that are at their conservative value."""

NOTHING: Arm = frozenset()
"""The baseline: the recipe's own values."""

_CHECKSUM = "engine.checksum"
_GENERATION = "policy.generation."
_ENVIRONMENT = ".env_vars."


class ArmRunner:
    """Runs starts for arms and gives their scores.

    Args:
        settings: settings of all starts, by dotted key.
        budget: seconds after which no further start is begun.
        replaces_engines: True if an engine can be replaced in its process, which saves starts of all workers.
    """

    def __init__(
        self,
        store: StartStore,
        switches: Sequence[MismatchSwitch],
        values: Mapping[str, Any],
        *,
        settings: Mapping[str, Any],
        budget: float,
        replaces_engines: bool = False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store = store
        self._values = values
        self._settings = settings
        self._deadline = time.monotonic() + budget
        self._progress = progress
        self.replaces_engines = replaces_engines
        """True if the engine's arms share a start."""
        self._switches = {switch.id: switch for switch in switches if switch.cost != "request"}
        self._answers: dict[Side, dict[Arm, StartAnswer]] = {"engine": {}, "trainer": {}}
        self._repeated: list[tuple[Side, str, StartAnswer]] = []
        self._together: dict[tuple[Arm, Arm], StartAnswer] = {}
        self._ignored: dict[Side, frozenset[str]] = {}
        self.starts: set[str] = set()
        """Names of the starts that were used, stored ones included."""
        self.is_complete = True
        """False once a start was left out for want of time."""
        self._coupled_arms: set[Arm] = set()
        requests: dict[Side, dict[str, dict[str, Any]]] = {
            side: {BASE: {}, "again": {}, "reversed": {"reversed": True}} for side in SIDES
        }
        for switch in switches:
            if switch.cost == "request":
                for side in SIDES if switch.side == "both" else (switch.side,):
                    requests[side][switch.id] = {switch.field: switch.value}
        base = self._answer(Start("baseline", settings, decode=requests["engine"], trainer=requests["trainer"]))
        if base is None or base.error:
            raise EngineError(f"the recipe can't be scored with its own settings: {base.error if base else 'no time'}")
        self.base: StartAnswer = base
        """Answer of the first start, with the recipe's own values."""
        self.tokens = FrozenTokens.from_frozen(store.frozen())
        for side in SIDES:
            self._answers[side][NOTHING] = base

    @property
    def is_coupled(self) -> bool:
        """True once a trainer's arm has changed the weights that the engine gets."""
        return bool(self._coupled_arms)

    def arm_of_all(self, side: Side) -> Arm:
        """Return the arm with all conservative values of a side."""
        return frozenset(switch.id for switch in self._switches.values() if switch.side == side)

    def run_repeated(self) -> None:
        """Run the arms of all conservative values, and repeat the baseline of each side after a restart."""
        all_engine, all_trainer = map(self.arm_of_all, SIDES)
        if all_trainer or not self.replaces_engines:
            answer = self._run(NOTHING, all_trainer)
            if not self.is_coupled:
                self._repeat("engine", "restarted", answer)
            self.run_together(all_engine, all_trainer)
        if self.replaces_engines or not any(side == "engine" for side, *_ in self._repeated):
            restarted = self._run(NOTHING, NOTHING)
            self._repeat("engine", "restarted", restarted)
            self._repeat("trainer", "restarted", restarted)
        if self.replaces_engines:
            self._repeat("engine", "replaced in its process", self._answer(self._replaced("engine-again", {})))
        answer = self._run(all_engine, NOTHING) if all_engine or not self.replaces_engines else None
        if not any(side == "trainer" for side, *_ in self._repeated):
            self._repeat("trainer", "restarted", answer)

    def _repeat(self, side: Side, label: str, answer: StartAnswer | None) -> None:
        """Take an answer for a repetition of a side's baseline, and ignore from now on what resolved differently."""
        if answer is None or answer.error or (side == "trainer" and not answer.scores["trainer"]):
            return
        self._repeated.append((side, label, answer))
        varying = differing_settings(_settings_of(side, self.base), _settings_of(side, answer))
        self._ignored[side] = self._ignored.get(side, frozenset()) | frozenset(varying)

    def run(self, engine: Sequence[Arm], trainer: Sequence[Arm]) -> None:
        """Run the arms that have no scores yet: two at a time, one of each side, unless engines are replaced."""
        missing_engine, missing_trainer = (
            [arm for arm in dict.fromkeys(arms) if arm and arm not in self._answers[side]]
            for side, arms in zip(SIDES, (engine, trainer), strict=True)
        )
        if self.is_coupled or self.replaces_engines:
            # The trainer's first: workers of the baseline that its arms would end are started once.
            pairs = [*((NOTHING, arm) for arm in missing_trainer), *((arm, NOTHING) for arm in missing_engine)]
        else:
            pairs = list(itertools.zip_longest(missing_engine, missing_trainer, fillvalue=NOTHING))
        for pair in pairs:
            answer = self._run(*pair)
            if answer is None or not all(pair):
                continue
            if pair[1] in self._coupled_arms:
                self._together[pair] = answer
            if answer.error or pair in self._together:
                # Each by itself: one of both may run, and beside the baseline each needs the baseline's weights.
                for side, arm in zip(SIDES, pair, strict=True):
                    del self._answers[side][arm]
                self._run(pair[0], NOTHING)
                self._run(NOTHING, pair[1])

    def _run(self, engine: Arm, trainer: Arm) -> StartAnswer | None:
        arms = dict(zip(SIDES, (engine, trainer), strict=True))
        name = "-and-".join(self._name(side, arm) for side, arm in arms.items() if arm) or "restart"
        values = self._settings_of_arms(engine | trainer)
        # A process gets its environment when it starts.
        is_replaced = (
            self.replaces_engines and engine and not trainer and not any(_ENVIRONMENT in key for key in values)
        )
        start = self._replaced(name, values) if is_replaced else Start(name, {**self._settings, **values})
        answer = self._answer(start)
        if answer is not None:
            if trainer and not answer.error and self._sends_other_weights(answer, engine):
                self._coupled_arms.add(trainer)
            for side, arm in arms.items():
                self._answers[side].setdefault(arm, answer)
        return answer

    def _sends_other_weights(self, answer: StartAnswer, engine: Arm) -> bool:
        """Return True if the engine got other weights than in the baseline, if only rounded in another way."""
        if answer.sent != self.base.sent:
            return True
        if engine:
            return False  # its own arm may change the dtype in which it keeps them
        before, after = (each.scores["engine_settings"].get(_CHECKSUM) for each in (self.base, answer))
        return bool(before != after)

    def run_together(self, engine: Arm, trainer: Arm) -> None:
        """Run an arm of each side in one start, if the sides are coupled and both arms change something."""
        if not (self.is_coupled and engine and trainer) or (engine, trainer) in self._together:
            return
        values = self._settings_of_arms(engine | trainer)
        name = f"{self._name('engine', engine)}-and-{self._name('trainer', trainer)}"
        answer = self._answer(Start(name, {**self._settings, **values}))
        if answer is not None and not answer.error:
            self._together[engine, trainer] = answer

    def _settings_of_arms(self, arms: Arm) -> dict[str, Any]:
        """Return the settings of arms by dotted key; what is taken out comes before what is set below it."""
        chosen = [switch for id_, switch in self._switches.items() if id_ in arms]
        chosen.sort(key=lambda switch: switch.value != {})
        steps = [switch.kept(self._values) for switch in chosen] + [switch.settings(self._values) for switch in chosen]
        return {key: value for settings in steps for key, value in settings.items()}

    def _replaced(self, name: str, values: Mapping[str, Any]) -> Start:
        """Return a start of an engine in place of that of the baseline's workers."""
        engine = {key.removeprefix(_GENERATION): value for key, value in values.items()}
        return Start(name, self._settings, engine=engine, trainer={})

    def _name(self, side: Side, arm: Arm) -> str:
        return f"all-{side}" if len(arm) > 1 and arm == self.arm_of_all(side) else "+".join(sorted(arm))

    def _answer(self, start: Start) -> StartAnswer | None:
        """Return the answer of a start; None if the budget does not suffice for it."""
        if not self._store.has(start):
            times = self._store.seconds_of_runs[start.engine is None]
            expected = sum(times) / len(times) if times else 0.0
            # The first start is the baseline, without which there is nothing to say.
            if self.starts and time.monotonic() + expected > self._deadline:
                self.is_complete = False
                return None
            self._progress(f"{'start' if start.engine is None else 'engine'} {self._store.runs + 1}: {start.name}")
        self.starts.add(start.name)
        return self._store.answer(start)

    def was_run(self, side: Side, arm: Arm) -> bool:
        """Return True if a start for the arm was run, with or without success."""
        return arm in self._answers[side]

    def error(self, side: Side, arm: Arm) -> str:
        """Return the error of an arm's start; empty if it has scores."""
        return self._answers[side][arm].error

    def has_scores(self, side: Side, arm: Arm) -> bool:
        """Return True if an arm has scores."""
        return self.was_run(side, arm) and not self.error(side, arm)

    def scored_arms(self, side: Side) -> list[Arm]:
        """Return the arms that have scores, the baseline first."""
        return [arm for arm in self._answers[side] if self.has_scores(side, arm)]

    def decode(self, arm: Arm, request: str = BASE, *, trainer: Arm = NOTHING) -> Any:
        """Return the engine's log-probs under an arm, [N].

        Args:
            trainer: the trainer's arm; if it sends other weights, the engine had those.
        """
        is_under_trainer = arm == NOTHING and trainer in self._coupled_arms
        answer = self._answers["trainer"][trainer] if is_under_trainer else self._answers["engine"][arm]
        return self.tokens.flat(answer.scores["decode"][request]["logprobs"], f"decode, {request}")

    def logprobs(self, arm: Arm, request: str = BASE) -> Any:
        """Return the trainer's log-probs under an arm, [N]."""
        answer = self._answers["trainer"][arm]
        return self.tokens.flat(answer.scores["trainer"][request]["logprobs"], f"trainer, {request}")

    def prefill(self) -> Any:
        """Return the engine's log-probs of the baseline by prefill, [N]."""
        return self.tokens.flat(self.base.scores["prefill"]["logprobs"], "prefill")

    def has_delta(self, engine: Arm, trainer: Arm) -> bool:
        """Return True if the mismatch under an arm of each side is known."""
        if self.is_coupled and engine and trainer:
            return (engine, trainer) in self._together
        return all(self.has_scores(side, arm) for side, arm in zip(SIDES, (engine, trainer), strict=True))

    def delta(self, engine: Arm, trainer: Arm) -> Any:
        """Return the mismatch Δ of each token under two arms, [N].

        It is the log-prob of the trainer minus that of the engine; the reverse for tokens that the trainer sampled.
        """
        if self.is_coupled and engine and trainer:
            scores = self._together[engine, trainer].scores
            logprobs, decode = (
                self.tokens.flat(scores[key][BASE]["logprobs"], f"{key}, both sides") for key in ("trainer", "decode")
            )
            return self.tokens.signed(logprobs - decode)
        return self.tokens.signed(self.logprobs(trainer) - self.decode(engine, trainer=trainer))

    def repetitions(self) -> dict[str, tuple[Any, Any]]:
        """Return the log-probs of each side beside those of its repetitions, by name of the repetition."""
        pairs: dict[str, tuple[Any, Any]] = {}
        for side in SIDES:
            read = self.decode if side == "engine" else self.logprobs
            for request, label in (("again", "same batch twice"), ("reversed", OTHER_ORDER)):
                pairs[f"{side}, {label}"] = (read(NOTHING), read(NOTHING, request))
        for side, label, answer in self._repeated:
            name = f"{side}, {label}"
            again = answer.scores["decode" if side == "engine" else "trainer"][BASE]["logprobs"]
            base = self.decode(NOTHING) if side == "engine" else self.logprobs(NOTHING)
            pairs[name] = (base, self.tokens.flat(again, name))
        return pairs

    def differences(self, side: Side, arm: Arm) -> dict[str, tuple[str, str]]:
        """Return what an arm really changed: resolved settings that differ from the baseline's."""
        before, after = (_settings_of(side, answer) for answer in (self.base, self._answers[side][arm]))
        return differing_settings(before, after, self._ignored.get(side, frozenset()) | {_CHECKSUM})

    def is_shown(self, switch: MismatchSwitch, arm: Arm) -> bool | None:
        """Return whether what ran under an arm has another value of a switch than the baseline; None: not resolved."""
        side: Side = "engine" if switch.side == "engine" else "trainer"
        resolved = (_settings_of(side, answer) for answer in (self.base, self._answers[side][arm]))
        before, after = (
            {name: value for name, value in settings.items() if switch.is_seen_in([name])} for settings in resolved
        )
        return before != after if before or after else None

    def request_differences(self, side: Side, request: str) -> dict[str, tuple[str, str]]:
        """Return what a request to the baseline really changed, as :meth:`differences` does for an arm."""
        answers = self.base.scores["decode" if side == "engine" else "trainer"]
        return differing_settings(answers[BASE]["settings"], answers[request]["settings"])

    def layers(self, side: Side, arm: Arm) -> LayerDifferences:
        """Return the differences of hidden states under an arm of one side."""
        answer = self._answers[side][arm]
        texts = [answer.scores["engine_settings"].get("engine.weights", "")]
        texts += [request["settings"].get("trainer.forward", "") for request in self.base.scores["trainer"].values()]
        if answer.scores["trainer"]:
            texts[1:] = [answer.scores["trainer"][BASE]["settings"].get("trainer.forward", "")]
        return layer_differences(answer.scores.get("layers"), answer.scores["prefill"]["logprobs"], texts)


def _settings_of(side: Side, answer: StartAnswer) -> Mapping[str, str]:
    scores = answer.scores
    settings: Mapping[str, str] = scores["engine_settings"] if side == "engine" else scores["trainer"][BASE]["settings"]
    return settings
