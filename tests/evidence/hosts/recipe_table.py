"""Plans of all recipes of a NeMo-RL checkout: ``python -m tests.evidence.hosts.recipe_table CHECKOUT``.

Each of its GRPO and PPO recipes is planned for a machine without GPUs, or refused with a reason. ``--run`` rehearses
twelve of the planned ones, drawn by lot. ``docs/hosts/recipes/<label>.json`` has the results; their table is made when
the site is built.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.hosts.nemo_rl.installed_version import commit_of
from nemo_geomask.recipe import ROOT_VARIABLE, read_recipe
from nemo_geomask.tools.check import RecipeFacts, check
from nemo_geomask.tools.rehearse.plan import plan
from nemo_geomask.tools.rehearse.refusals import BACKEND, LAUNCH_VARIABLES, errors_of
from nemo_geomask.tools.rehearse.rehearsal import rehearse
from nemo_geomask.tools.rehearse.supervision import signals_as_exceptions
from tests.evidence.hosts.case_matrix import HOSTS
from tests.helpers.markdown import markdown_table

SEED = 2029
DRAWN = 12
"""Number of planned recipes that are rehearsed, drawn with :data:`SEED`."""
_EXAMPLES = "examples"


def plan_recipes(checkout: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each recipe below ``examples/``, and what its rehearsal would be.

    Files that configure no training, such as those of NeMo-Gym's servers, are left out.
    """
    for path in sorted((checkout / _EXAMPLES).rglob("*.yaml")):
        try:
            recipe = read_recipe(path, leave=("data", "env"))
        except ConfigError as error:
            yield _name(path, checkout), {"algorithm": None, "refused": {"by": "the file", "reason": str(error)}}
            continue
        facts = RecipeFacts.from_recipe(recipe)
        algorithm = facts.other_algorithm or next((name for name in ("ppo", "grpo") if name in recipe.data), None)
        if algorithm is not None and algorithm != "evaluation" and facts.get("policy") is not None:
            environment = _launch_variables(path, checkout)
            yield _name(path, checkout), {"algorithm": algorithm, **_planned(facts, environment)}


def _name(path: Path, checkout: Path) -> str:
    return path.relative_to(checkout / _EXAMPLES).as_posix()


def _launch_variables(path: Path, checkout: Path) -> dict[str, str]:
    """Return the environment variables with which NeMo-RL's own script of a recipe starts it."""
    script = next((checkout / "tests" / "test_suites").rglob(f"{path.stem}.sh"), None)
    exports = re.findall(r"^export (\w+)=(\S+)$", script.read_text(encoding="utf-8"), re.MULTILINE) if script else []
    return {name: value for name, value in exports if name in LAUNCH_VARIABLES}


def _planned(facts: RecipeFacts, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the architecture and what trains it, or the reason for the refusal."""
    errors = errors_of(check(facts), environment)
    if errors and facts.other_algorithm is None:
        first = errors[0]
        reason = f"{first.key}: {first.message}"
        return {"refused": {"by": f"check {first.rule.id} ({first.rule.title})", "reason": reason}}
    try:
        planned = plan(facts, folder=Path("rehearsal"))
    except ConfigError as error:
        key = error.problems[0].keys[0] if error.problems and error.problems[0].keys else ""
        value = facts.get(key) if key else None
        by = f"{key}: {value}" if key and not isinstance(value, Mapping) else "its algorithm"
        return {"refused": {"by": by, "reason": str(error)}}
    trainer = "Megatron" if facts.uses_megatron else "DTensor v2" if planned.uses_automodel else "DTensor v1"
    backend = facts.get(BACKEND, "vllm")
    details = {} if backend == "vllm" else {"in_place_of": backend}
    if environment:
        details["environment"] = dict(environment)
    entry = {"model_type": planned.model.model_type, "trainer": trainer, "script": planned.script}
    return {"planned": entry | details}


def drawn(recipes: Mapping[str, Mapping[str, Any]], number: int = DRAWN, seed: int = SEED) -> list[str]:
    """Draw some of the planned recipes at random; the same seed draws the same ones.

    All recipes, planned or not, are put in a random order, and the first planned ones of it are drawn. If a later
    version can plan one recipe more, at most one recipe of the draw is replaced.
    """
    order = random.Random(seed).sample(sorted(recipes), len(recipes))
    return [name for name in order if "planned" in recipes[name]][:number]


def rehearse_recipe(path: Path, timeout: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Rehearse two steps of a recipe under additional environment variables, and return how it ended."""
    began = time.monotonic()
    error_line: str | None
    metrics: Mapping[int, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment or {}):
        try:
            rehearsal = rehearse(path, steps=2, timeout=timeout, folder=Path(folder, "out"))
        except GeomaskError as error:
            outcome, error_line = "failed", str(error)
        else:
            run = rehearsal.outcome
            outcome = "trained" if rehearsal.ok else "failed"
            failure = run.failure if run is not None else None
            error_line = f"{failure.stage}: {failure.error}" if failure is not None else None
            metrics = run.metrics if run is not None else metrics
    return {
        "outcome": outcome,
        "error": error_line,
        "seconds": round(time.monotonic() - began),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "steps": {
            str(step): {key: values[key] for key in ("loss", "grad_norm", "gen_kl_error") if key in values}
            for step, values in metrics.items()
        },
    }


def recipe_tables(path: Path = HOSTS / "recipes" / "main.json") -> str:
    """Return the Markdown tables of the results in a file."""
    table = json.loads(path.read_text(encoding="utf-8"))
    recipes = table["recipes"]
    trained = {name: entry for name, entry in recipes.items() if entry["algorithm"] in ("grpo", "ppo", None)}
    other_algorithms = Counter(
        entry["algorithm"] for entry in recipes.values() if entry["algorithm"] not in ("grpo", "ppo", None)
    )
    planned = {name: entry["planned"] for name, entry in trained.items() if "planned" in entry}
    refused = {name: entry["refused"] for name, entry in trained.items() if "refused" in entry}
    architectures = Counter((entry["model_type"], entry["trainer"]) for entry in planned.values())
    reasons = Counter(entry["by"] for entry in refused.values())
    chosen = set(drawn(recipes))
    lines = [
        f"NeMo-RL {table['label']}" + (f" ({table['commit'][:9]})" if table.get("commit") else "") + f": of "
        f"{len(trained)} GRPO and PPO recipes, {len(planned)} are planned and {len(refused)} refused.",
        "",
        markdown_table(
            ("architecture", "trainer", "planned"),
            [(model, trainer, str(n)) for (model, trainer), n in architectures.most_common()],
        ),
        "",
        markdown_table(("refused by", "recipes"), [(by, str(number)) for by, number in reasons.most_common()]),
        "",
        f"Drawn by lot (seed {SEED}), or rehearsed in addition:",
        "",
        markdown_table(
            ("recipe", "drawn", "outcome", "date"),
            [
                (
                    name,
                    "yes" if name in chosen else "",
                    _outcome(entry["run"]) if "run" in entry else "not rehearsed yet",
                    entry.get("run", {}).get("date", ""),
                )
                for name, entry in trained.items()
                if "run" in entry or name in chosen
            ],
        ),
        "",
        "All recipes:",
        "",
        markdown_table(("recipe", "rehearsal"), [(name, _cell(entry)) for name, entry in trained.items()]),
        "",
        "Recipes that train no policy loss: "
        + ", ".join(f"{number} of {name}" for name, number in other_algorithms.items())
        + ".",
    ]
    return "\n".join(lines)


def _outcome(run: Mapping[str, Any]) -> str:
    return f"{run['outcome']} in {run['seconds']} s" + (f": {run['error']}" if run["error"] else "")


def _cell(entry: Mapping[str, Any]) -> str:
    if "refused" in entry:
        return "refused: " + " ".join(entry["refused"]["reason"].split())
    planned = entry["planned"]
    text = f"a tiny {planned['model_type']}, {planned['trainer']}"
    if "in_place_of" in planned:
        text += f", sampled by vLLM in place of {planned['in_place_of']}"
    for name, value in planned.get("environment", {}).items():
        text += f", with {name}={value} as in NeMo-RL's own script"
    return f"{text}; {_outcome(entry['run'])}" if "run" in entry else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all recipes, rehearse those drawn if asked, and write the results; return 0 if every rehearsal trained."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.hosts.recipe_table", description=__doc__)
    parser.add_argument("checkout", type=Path, help="NeMo-RL checkout")
    parser.add_argument("--label", default="main", help="name of this NeMo-RL (default: main)")
    parser.add_argument("--results", type=Path, default=HOSTS / "recipes", help="folder of the results")
    parser.add_argument("--run", action="store_true", help=f"rehearse the {DRAWN} that are drawn, one after another")
    parser.add_argument("--only", action="append", help="rehearse these recipes, by path below examples/ (repeatable)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="time limit of a rehearsal in seconds (default: 900)"
    )
    options = parser.parse_args(arguments)
    path = options.results / f"{options.label}.json"
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"recipes": {}}
    all_trained = True
    checkout = options.checkout.resolve()
    if not (checkout / _EXAMPLES).is_dir():
        parser.error(f"{checkout} is no NeMo-RL checkout: it has no folder {_EXAMPLES}")
    os.environ[ROOT_VARIABLE] = str(checkout)
    runs = {name: entry["run"] for name, entry in table["recipes"].items() if "run" in entry}
    recipes = {name: entry | ({"run": runs[name]} if name in runs else {}) for name, entry in plan_recipes(checkout)}
    table = {"label": options.label, "commit": commit_of(checkout), "seed": SEED, "recipes": recipes}
    _write(path, table)
    chosen = [*(drawn(recipes) if options.run else ()), *(options.only or ())]
    if unknown := [name for name in chosen if name not in recipes]:
        parser.error(f"--only: {checkout / _EXAMPLES} has no recipe {unknown[0]}")
    with signals_as_exceptions():
        for name in chosen:
            environment = recipes[name].get("planned", {}).get("environment")
            run = rehearse_recipe(checkout / _EXAMPLES / name, options.timeout, environment)
            print(f"{name}: {_outcome(run)}", file=sys.stderr, flush=True)
            recipes[name]["run"] = run
            all_trained = all_trained and run["outcome"] == "trained"
            _write(path, table)
    return 0 if all_trained else 1


def _write(path: Path, table: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
