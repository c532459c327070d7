"""What conducting costs: the share of a recipe's wall time outside trainers and engine, and a run that finds everything finished.

    make bench                                   both figures, ten minutes
    python tests/bench/overhead.py --set cold_start.examples=96 ...    the same on a smaller recipe

Every figure is a ratio of two things measured in this run: the recipe's own clock against the time that its stages
spent inside trainers and engine, and the command against an interpreter that only imports what the command imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POSTTRAIN = Path(sys.executable).with_name("posttrain")
IMPORTS = "import flows.cli, flows.terminal, flows.scores.ablation, rich.progress"
REPEATS = 9


def seconds(command: list[str | Path], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s (min {min(values):.2f}, max {max(values):.2f}, {len(values)} times)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny", help="name or path of the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting to change")
    given = parser.parse_args()
    options = [part for override in given.set for part in ("--set", override)]
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        environment = os.environ | {"POSTTRAIN_HOME": folder}
        print(f"running {given.recipe} in a home of its own ...", flush=True)
        start = time.perf_counter()
        done = subprocess.run([POSTTRAIN, "run", given.recipe, *options, "--json"], env=environment, check=True, capture_output=True)
        wall = time.perf_counter() - start
        totals = json.loads(done.stdout)["totals"]
        print(f"recipe          {wall:.1f} s for {totals['stages_run']} stages, {totals['busy_seconds']:.1f} s inside trainers and engine")
        print(f"overhead        {1 - totals['busy_seconds'] / wall:.1%} of the wall time")
        nothing, imports, bare = [], [], []
        for _ in range(REPEATS):  # side by side, so that a busy machine slows all of them
            nothing.append(seconds([POSTTRAIN, "run", given.recipe, *options], environment))
            imports.append(
                seconds([sys.executable, "-c", "import flows.cli, flows.terminal, flows.scores.ablation, rich.progress"], environment)
            )
            bare.append(seconds([sys.executable, "-c", "pass"], environment))
    print(f"nothing to do   {spread(nothing)}")
    print(f"its imports     {spread(imports)}")
    print(f"interpreter     {spread(bare)}")
    print(f"no-op rerun     {statistics.median(nothing) / statistics.median(imports):.2f} times its bare imports")


if __name__ == "__main__":
    main()
