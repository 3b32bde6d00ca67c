"""Write the tables and figures of the lab's runs in ``docs/evidence``: ``python -m tests.evidence.lab``.

With ``--collect NAME DIR…`` it first writes the metrics of the runs in these folders to ``docs/evidence/NAME.parquet``;
``columns.toml`` defines the columns and figures of each file. With REGIME and STAGE it first trains what is missing of
a stage of ``docs/evidence/tuned.toml``, and writes its finished runs to ``docs/evidence/tuned/REGIME.parquet``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from nemo_geomask.tools.lab.run_store import read_curves
from nemo_geomask.tools.lab.train_recipe import parse_seeds
from tests.evidence.lab.columns import EVIDENCE_SPECS
from tests.evidence.lab.figures import draw_evidence
from tests.evidence.lab.regimes import read_regimes
from tests.evidence.lab.stages import (
    Stage,
    check_stored_runs,
    draw_regimes,
    load_tuned_runs,
    train_stage,
    tuned_page,
)
from tests.evidence.lab.untuned import PAGES, collect_runs, load_runs, rewrite_page, split_runs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("regime", nargs="?", help="a regime of tuned.toml, to train a stage of it")
    parser.add_argument("stage", nargs="?", choices=get_args(Stage), help="what to train")
    parser.add_argument("--seeds", help="some of the stage's seeds, such as 301..303 (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("results/tuned"), help="folder of the trained runs")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the pages and data (default: docs)")
    parser.add_argument("--collect", nargs="+", metavar=("NAME", "DIR"), help="data file to write, and folders of runs")
    parser.add_argument(
        "--split",
        nargs="+",
        metavar=("DIMENSION", "EDGE"),
        help="with --collect: split the tokens of recorded runs by a dimension, at these edges",
    )
    parser.add_argument(
        "--matched-by", default="", metavar="DIMENSION", help="with --split: weight its bins as the first part does"
    )
    parser.add_argument("--without-token", type=int, metavar="ID", help="with --split: leave out tokens with this id")
    arguments = parser.parse_args()
    if arguments.split is None and (arguments.matched_by or arguments.without_token is not None):
        parser.error("--matched-by and --without-token need --split")
    folder = arguments.docs / "evidence"
    regimes = read_regimes(folder / "tuned.toml")
    for regime in regimes.values():
        check_stored_runs(regime, load_tuned_runs(folder / "tuned" / f"{regime.name}.parquet", regime.outcome))
    if arguments.regime is not None:
        if arguments.regime not in regimes or arguments.stage is None:
            parser.error(f"name a regime ({', '.join(regimes)}) and a stage ({', '.join(get_args(Stage))})")
        seeds = parse_seeds(arguments.seeds) if arguments.seeds else None
        train_stage(
            regimes[arguments.regime],
            arguments.stage,
            docs=arguments.docs,
            out=arguments.out,
            seeds=seeds,
            jobs=arguments.jobs,
        )
    if arguments.collect:
        name, *folders = arguments.collect[0], *map(Path, arguments.collect[1:])
        if arguments.split:
            dimension, *edges = arguments.split
            curves = split_runs(
                folders,
                dimension,
                [float(edge) for edge in edges],
                matched_by=arguments.matched_by,
                without_token=arguments.without_token,
            )
        else:
            curves = read_curves(folders)
        collect_runs(curves, folder / f"{name}.parquet", EVIDENCE_SPECS[name])
    for path in sorted(folder.glob("*.parquet")):
        curves, spec = load_runs(path), EVIDENCE_SPECS[path.stem]
        if spec.curves:
            draw_evidence(curves, path.with_suffix(".png"), spec)
    draw_regimes(folder, regimes)
    (folder / "tuned.md").write_text(tuned_page(folder, regimes), encoding="utf-8")
    for page in (folder / name for name in PAGES):
        page.write_text(rewrite_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
