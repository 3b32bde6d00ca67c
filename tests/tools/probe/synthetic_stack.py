"""A launcher whose log-probs are made up, with planted causes; for tests of planning and statistics alone."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy


@dataclass
class SyntheticStack:
    """Writes answers as NeMo-RL's driver would.

    Attributes:
        causes: by key: side, size of the noise on each log-prob that the key's baseline value brings.
        conservative: by key: the value under which the noise is gone.
        ignored: keys that nobody reads.
        failing: keys with which the workers can't start.
        requests: by request's option: side and size of the noise that goes with the option.
        base_noise: noise that no switch removes.
        restart_noise: noise that differs from start to start.
        rounding: keys of the engine's and of the trainer's dtype, and the size of the noise in the engine's log-probs
            unless both have their conservative values in one start: a refit rounds weights to the trainer's dtype.
        timeout_of_start: number of the start that reaches the time limit, from 1; 0 for none.
        starts: settings of each start, of workers or of an engine in place of theirs.
        fresh: number of starts of workers.
    """

    causes: dict = field(default_factory=dict)
    conservative: dict = field(default_factory=dict)
    ignored: frozenset = frozenset()
    failing: frozenset = frozenset()
    requests: dict = field(default_factory=dict)
    base_noise: float = 0.0
    restart_noise: float = 0.0
    rounding: tuple = ()
    timeout_of_start: int = 0
    starts: list = field(default_factory=list)
    fresh: int = 0

    def __call__(self, job, *, name, settings, is_fresh):
        settings = {**settings, **{f"policy.generation.{key}": value for key, value in (job["engine"] or {}).items()}}
        self.starts.append(settings)
        self.fresh += is_fresh
        error = next((f"ValueError: {key} is wrong" for key in settings if key in self.failing), "")
        is_timeout = not error and len(self.starts) == self.timeout_of_start
        error = error or ("not done after 900 s" if is_timeout else "")
        outcome = SimpleNamespace(error=error, is_timeout=is_timeout, events=(self.weights(settings),))
        if error:
            return outcome
        frozen_file = Path(job["frozen"])
        if not frozen_file.is_file():
            frozen = _frozen(job["prompts"], job["generations"])
            frozen["sampled"] = self._scores("engine", frozen, settings, {})["logprobs"]
            frozen_file.write_text(json.dumps(frozen))
        frozen = json.loads(frozen_file.read_text())
        answer = {
            "decode": {
                name: self._scores("engine", frozen, settings, options)
                | {"settings": {"request.options": str(options)}}
                for name, options in job["decode"].items()
            },
            "prefill": self._scores("engine", frozen, settings, {}),
            "engine_settings": self.resolved("engine", settings),
            "trainer": {
                name: self._scores("trainer", frozen, settings, options)
                | {"settings": self.resolved("trainer", settings) | {"trainer.options": str(options)}}
                for name, options in job["trainer"].items()
            },
        }
        Path(job["out"]).write_text(json.dumps(answer))
        return outcome

    def weights(self, settings):
        sent = str(settings.get(self.rounding[1])) if self.rounding else "1"
        return {"kind": "weights", "differences": [], "sent": sent}

    def resolved(self, side, settings):
        read = {
            key: str(value)
            for key, value in settings.items()
            if key not in self.ignored and self.causes.get(key, (side,))[0] == side
        }
        return {f"{side}.{key}": value for key, value in read.items()} | {"engine.checksum": "1", f"{side}.port": "x"}

    def _scores(self, side, frozen, settings, options):
        scores = []
        for index, sampled in enumerate(frozen["truth"]):
            values = numpy.array(sampled)
            for key, (where, size) in self.causes.items():
                is_off = key not in self.ignored and settings.get(key) == self.conservative[key]
                if where == side and not is_off:
                    values = values + size * _noise(key, index, len(values))
            for option, (where, size) in self.requests.items():
                if where == side and option not in options:
                    values = values + size * _noise(option, index, len(values))
            if side == "engine" and self.rounding and not all(settings.get(key) for key in self.rounding[:2]):
                values = values + self.rounding[2] * _noise("rounding", index, len(values))
            if side == "engine":
                values = values + self.base_noise * _noise("base", index, len(values))
            values = values + self.restart_noise * _noise(f"{side}{len(self.starts)}{options}", index, len(values))
            scores.append(values.tolist())
        return {"logprobs": scores}


def _noise(name, index, length):
    return numpy.random.default_rng(zlib.crc32(f"{name} {index}".encode())).standard_normal(length)


def _frozen(prompts, generations):
    generator = numpy.random.default_rng(7)
    count = prompts * generations
    lengths = generator.integers(8, 24, count)
    truth = [(-generator.exponential(2.0, length)).tolist() for length in lengths]
    return {
        "sequences": [[1, 2, 3, *generator.integers(3, 100, length).tolist()] for length in lengths],
        "prompt_lengths": [3] * count,
        "prompts": [index // generations for index in range(count)],
        "by_trainer": [index % 2 == 1 for index in range(count)],
        "trainer_error": "",
        "truth": truth,
    }
