"""The table of families: every golden model under every condition, on running clusters over HTTP.

For each model and condition, the table has the greatest deviation of a logprob from Hugging Face transformers. Greedy
tokens must be equal, and answers must have the same bits as under the first condition. The exit code is 1 if anything
fails. A run of all models of a table under all conditions writes its JSON and the table in docs/families.md.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback

from families_conditions import CONDITIONS, Run
from families_model import FORMATS, OF_FORMATS, Model
from families_page import BOTH_SEEDS, TABLES, results_of, write_page
from harness import cpu_paths, machine


def measure(name, seed, conditions):
    """Returns {condition: cell} of one model with one seed, and the failures by condition."""
    cells, failures, began = {}, {}, time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Model(name, seed), directory)
        # "whole" runs first, because the bits of all other conditions are compared with it.
        for condition in ["whole", *(condition for condition in CONDITIONS if condition in conditions and condition != "whole")]:
            try:
                cell = CONDITIONS[condition](run)
                cells[condition] = cell and dataclasses.asdict(cell)
                if cell and not cell.same_bits:
                    failures[condition] = "other bits"
            except Exception:
                failures[condition] = traceback.format_exc()
                if condition == "whole":
                    break
    return {"poisoned": run.poisoned, "seconds": round(time.monotonic() - began, 1), "cells": cells}, failures


def main():
    parser = argparse.ArgumentParser(prog="tests/families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = [name for models in TABLES.values() for name in models]
    parser.add_argument("--models", nargs="*", default=families, choices=[*families, *FORMATS], metavar="MODEL", help="all families by default; or quantised checkpoints of tests/formats")
    parser.add_argument("--seeds", nargs="*", default=list(BOTH_SEEDS), choices=BOTH_SEEDS, metavar="SEED", help="both by default")
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS), choices=list(CONDITIONS), metavar="CONDITION")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models at a time")
    options = parser.parse_args()
    whole = (options.seeds, options.conditions) == (list(BOTH_SEEDS), list(CONDITIONS))

    asked = [(name, seed) for name in options.models for seed in ((OF_FORMATS,) if name in FORMATS else options.seeds)]
    models, failed = {}, 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        runs = pool.map(measure, *zip(*asked), [options.conditions] * len(asked))
        for (name, seed), (result, failures) in zip(asked, runs):
            models.setdefault(name, {})[seed] = result
            failed += len(failures)
            cells = ", ".join(f"{c} {cell['deviation']:.1e}" if cell else f"{c} -" for c, cell in result["cells"].items())
            print(f"{seed}/{name} in {result['seconds']} s: {cells}", flush=True)
            for condition, why in failures.items():
                print(f"{seed}/{name} FAILED {condition}: {why}", flush=True)
    print(f"{len(asked)} models, {failed} failures")
    written = [name for name, of_table in TABLES.items() if not failed and whole and set(of_table) <= set(models)]
    for name in written:
        of_table = {"machine": machine() | {"instructions": cpu_paths()[-1]}, "models": {model: models[model] for model in TABLES[name]}}
        results_of(name).write_text(json.dumps(of_table, indent=1) + "\n")
        print(f"wrote {pathlib.Path(os.path.relpath(results_of(name)))}")
    if written:
        write_page()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
