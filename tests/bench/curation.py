"""How the searches and queries of curation grow with the number of rows.

Times near-duplicates, the SQL from raw rows to `dropped` and `funnel`, the question `why`, and the curriculum, for
10^4 rows up to the size asked for, with one thread, in CPU seconds. The exponent is the slope of log(seconds)
on log(rows); n log n has about 1.1 over these sizes.

    python tests/bench/curation.py [--to 6] [--memory-gib 4]

`--to 7` needs some 10 GiB of disk and half an hour.
"""

from __future__ import annotations

import argparse
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from stages.config import Curation, CurriculumConfig
from stages.curation import DATASETS, DUPLICATES, MARTS, PROBLEMS, STAGING, build, prepare
from stages.curriculum import Curriculum
from stages.decontamination import COUNTS, HITS
from stages.near_duplicates import find
from stages.sources import RawRow

WORDS = np.array([f"{first}{second}{third}" for first in "bcdfgklmnprst" for second in "aeiou" for third in "bcdfgklmnprst"])
_BATCH = 100_000
_NOT_MEASURED = ("benchmarks", "contamination", "contamination_counts", "numbered_twins", "sources", "families")


def questions(count: int) -> Iterator[list[str]]:
    """Batches of word problems of 15 to 30 words with two numbers; one in twenty repeats the one before with a word more."""
    rng = np.random.default_rng(0)
    for start in range(0, count, _BATCH):
        batch = []
        for length in rng.integers(15, 31, min(_BATCH, count - start)).tolist():
            if batch and rng.random() < 0.05:
                batch.append(batch[-1] + " indeed")
            else:
                words = " ".join(WORDS[rng.integers(0, len(WORDS), length)])
                batch.append(f"{words} {rng.integers(1, 1000)} and {rng.integers(1, 1000)} how many")
        yield batch


def fill(database: duckdb.DuckDBPyConnection, count: int) -> None:
    """Put `count` training rows and ten of a benchmark into `raw_rows`."""
    number = 0
    for batch in [*questions(count), [f"held out {index}" for index in range(10)]]:
        held_out = batch[0].startswith("held out")
        columns: dict[str, pa.Array] = {name: pa.nulls(len(batch), pa.string()) for name in RawRow._fields}
        texts = {"question": batch, "answer": ["7"] * len(batch), "row_text": batch}
        fixed = {"source": "held_out" if held_out else "train", "family": "words", "answer_type": "text"}
        columns |= {name: pa.array(values) for name, values in texts.items()}
        columns |= {name: pa.array([value] * len(batch)) for name, value in fixed.items()}
        columns["benchmark"] = pa.array(["test" if held_out else None] * len(batch), pa.string())
        columns["pool_order"] = pa.array([int(held_out)] * len(batch))
        columns["scale"] = pa.array([0] * len(batch))
        columns["row_number"] = pa.array(range(number + 1, number + len(batch) + 1))
        database.from_arrow(pa.table(columns)).insert_into("raw_rows")
        number += len(batch)


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(count: int, memory_gib: float) -> dict[str, float]:
    """Seconds of each part at `count` rows."""
    source = {"kind": "file", "path": "unused.jsonl"}
    config = Curation.model_validate(
        {"sources": [source], "benchmarks": {"test": [source]}, "pools": {"rl": {"share": 1}}, "near_duplicate_similarity": 0.6}
    )
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        limits = {"threads": 1, "memory_limit": f"{memory_gib}GiB", "temp_directory": folder}
        with duckdb.connect(Path(folder) / "bench.duckdb", config=limits) as database:
            prepare(database, config, 0)
            fill(database, count)
            seconds["staging and duplicates (SQL)"] = timed(
                lambda: (build(database, "staging", STAGING), build(database, "intermediate", DUPLICATES))
            )
            columns = "problem_id, folded, signs, answer"
            texts = database.sql(
                f"select {columns} from int_training_copies where copy = 1 order by pool_order, row_number"
            ).to_arrow_table()
            start = time.process_time()
            near = find(texts, config.near_duplicate_similarity)
            seconds["near-duplicates"] = time.process_time() - start
            del texts
            database.from_arrow(near.pairs).create("near_duplicates")
            for name, schema in (("contamination_hits", HITS), ("contamination_totals", COUNTS)):
                database.from_arrow(schema.empty_table()).create(name)
            rest = [name for name in MARTS if name not in _NOT_MEASURED]
            seconds["pools, dropped, funnel (SQL)"] = timed(
                lambda: (
                    build(database, "intermediate", (*PROBLEMS, "int_contamination")),
                    build(database, "marts", ("benchmarks", *rest)),
                )
            )
            problem = str(database.execute("select problem_id from dropped limit 1").fetchall()[0][0])
            question = "select rule, evidence, other_question from dropped where problem_id = ?"
            seconds["why was it dropped (SQL)"] = timed(lambda: database.execute(question, [problem]).fetchall())
            seconds |= curriculum(database, count)
            found = database.execute("select rows from funnel where step = 'near duplicate' and family = 'all'").fetchall()[0][0]
            planted = database.execute("select count(*) from raw_rows where question like '%indeed'").fetchall()[0][0]
            print(f"{count:>10,} rows: {found:,} of {planted:,} planted near-duplicates dropped", flush=True)
    return seconds


def curriculum(database: duckdb.DuckDBPyConnection, count: int) -> dict[str, float]:
    """Seconds for the choice of a step's problems among `count`, and for asking `count` kept rollouts who was sampled when and why."""
    rng = np.random.default_rng(1)
    chooser = Curriculum(CurriculumConfig(order="prioritised", live=True), ["words"] * count, 100, 64, 0)
    standings = [chooser.start(rng.random(count).tolist())]
    chosen = timed(lambda: chooser.choose(chooser.observe(standings.pop(), {0: (1, 8)}), 1))
    numbers = np.arange(count)
    rollouts = pa.table(
        {
            "stage": pa.array(np.full(count, "reasoning_rl")),
            "step": numbers // 512,
            "problem_id": pa.array(numbers * 7919 % max(count // 8, 1)).cast(pa.string()),
            "reward": rng.random(count),
            "why": pa.array(np.full(count, "prioritised: 1 - 0.5")),
            "success_rate": rng.random(count),
            "weight": rng.random(count),
        }
    )
    database.from_arrow(rollouts).create("rollouts")
    question = (DATASETS / "questions" / "sampled.sql").read_text()
    asked = timed(lambda: database.execute(question, {"problem_id": "7"}).fetchall())
    return {"curriculum: a step's problems": chosen, "curriculum: who was sampled (SQL)": asked}


def main() -> None:
    """Print seconds by size, and the exponents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=int, default=6, help="largest size, as a power of ten")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="memory limit of DuckDB")
    asked = parser.parse_args()
    measure(1000, asked.memory_gib)  # imports and first calls
    sizes = [10**power for power in range(4, asked.to + 1)]
    taken = [measure(size, asked.memory_gib) for size in sizes]
    print(f"\n{'CPU seconds at':<32}" + "".join(f"{f'{size:,}':>14}" for size in sizes) + f"{'exponent':>10}{'last step':>11}")
    for part in taken[0]:
        values = [seconds[part] for seconds in taken]
        slope = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
        last = math.log10(values[-1] / values[-2]) if len(values) > 1 else math.nan
        print(f"{part:<32}" + "".join(f"{value:>14.2f}" for value in values) + f"{slope:>10.2f}{last:>11.2f}")
    reference = [size * math.log(size) for size in sizes]
    slope = float(np.polyfit(np.log(sizes), np.log(reference), 1)[0])
    print(f"{'n log n':<32}" + " " * 14 * len(sizes) + f"{slope:>10.2f}")
    print(f"\nlargest resident size: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
