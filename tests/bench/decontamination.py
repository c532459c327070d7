"""What decontamination costs: rule open_r1 against the same rule written over Python sets, and memory from 10^4 documents on.

    python tests/bench/decontamination.py                       ratios, and memory up to 10^6 documents; five minutes
    python tests/bench/decontamination.py --rows 10000000       memory up to 10^7 documents; half an hour

Documents look like problems: 30 to 60 words, drawn from 20,000 with Zipf's frequencies; one in a hundred holds 5 to 12 words in
a row of one of 1,400 benchmark questions of 60 words. Speed is processor time of one thread, both sides on the same documents
in turn: the sets get Python strings, ours an Arrow table. What each builds once from the benchmarks is timed apart. The files
for memory repeat 50,000 documents, each with a number of its own at its end; each is searched in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import compute, parquet

from stages.config import Decontamination
from stages.decontamination import find, parquet_batches

RULE = Decontamination(drop=("open_r1",), report=(), wording_share=None)
T = TypeVar("T")
REPEATS = 5
SPEED_DOCUMENTS = 50_000


class Language:
    """Words with Zipf's frequencies, and texts made of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        letters = "etaoinshrdlucmfwypvbgk"
        self.words = ["".join(rng.choices(letters, k=rng.randint(1, 3) + rng.randint(0, 8))) for _ in range(20_000)]
        self.weights = list(accumulate(1 / rank for rank in range(1, len(self.words) + 1)))

    def text(self, words: int) -> list[str]:
        return self.rng.choices(self.words, cum_weights=self.weights, k=words)

    def documents(self, count: int, held_out: list[str], joint: str = " ", foreign: float = 0.0) -> Iterator[str]:
        """Problem-like documents. `joint` stands at a sentence's end; a share `foreign` has a character outside ASCII."""
        rng = self.rng
        for _ in range(count):
            words = self.text(rng.randint(30, 60))
            if rng.random() < 0.01:
                source, length = rng.choice(held_out).split(), rng.randint(5, 12)
                start, place = rng.randrange(60 - length), rng.randrange(len(words))
                words[place:place] = source[start : start + length]
            half = len(words) // 2
            end = "…" if rng.random() < foreign else "."
            yield f"{' '.join(words[:half]).capitalize()}{end}{joint}{' '.join(words[half:])} {rng.randint(1, 99)}?"


def over_sets(documents: list[str], runs: set[str]) -> list[int]:
    """The rule as open-r1 has it, on Python sets; stops at a document's first shared run."""
    hits = []
    for index, document in enumerate(documents):
        words = document.lower().split()
        if any(" ".join(words[start : start + 8]) in runs for start in range(len(words) - 7)):
            hits.append(index)
    return hits


def runs_of(held_out: list[str]) -> set[str]:
    split = [question.lower().split() for question in held_out]
    return {" ".join(words[start : start + 8]) for words in split for start in range(len(words) - 7)}


def table(texts: list[str], first: int = 0) -> pa.Table:
    return pa.table({"problem_id": [f"{first + index:016x}" for index in range(len(texts))], "question": texts})


def benchmarks(held_out: list[str]) -> pa.Table:
    return pa.table(
        {"benchmark": ["held_out"] * len(held_out), "problem_id": [f"b{index}" for index in range(len(held_out))], "question": held_out}
    )


def clock(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def speed(name: str, documents: list[str], held_out: list[str]) -> None:
    asked, tests, nothing = table(documents), benchmarks(held_out), table([])
    plain, ours, plain_once, ours_once, equal = [], [], [], [], True
    for _ in range(REPEATS):  # in turn, so that a busy machine slows both
        seconds, runs = clock(lambda: runs_of(held_out))
        plain_once.append(seconds)
        seconds, expected = clock(lambda runs=runs: over_sets(documents, runs))
        plain.append(seconds)
        seconds, _ = clock(lambda: find(nothing.to_batches, tests, RULE))
        ours_once.append(seconds)
        seconds, found = clock(lambda: find(asked.to_batches, tests, RULE))
        ours.append(seconds)
        equal &= [f"{index:016x}" for index in expected] == found.hits["problem_id"].to_pylist()
    once = min(ours_once)
    ratios = sorted(sets / (fast - once) for sets, fast in zip(plain, ours, strict=True))
    best = min(plain) / (min(ours) - once)
    print(
        f"{name:26} {len(documents) / min(plain):>7,.0f} documents/s over sets, {len(documents) / (min(ours) - once):>8,.0f} ours: "
        f"{best:.1f} times at the best of {REPEATS} each (paired: median {statistics.median(ratios):.1f}, "
        f"min {ratios[0]:.1f}, max {ratios[-1]:.1f}); built once in {min(plain_once):.2f} s and {once:.2f} s; "
        f"{len(found.hits)} hits, {'equal' if equal else 'NOT EQUAL'}",
        flush=True,
    )


def write(path: Path, rows: int, documents: list[str]) -> None:
    """`rows` documents in a Parquet file, a batch at a time."""
    texts = pa.array(documents)
    with parquet.ParquetWriter(path, table([""]).schema, compression="zstd") as writer:
        for first in range(0, rows, len(texts)):
            count = min(len(texts), rows - first)
            ids = pa.array([f"{first + index:016x}" for index in range(count)])
            writer.write_table(pa.table([ids, compute.binary_join_element_wise(texts[:count], ids, " ")], schema=table([""]).schema))


def measure(path: Path, held_out: Path) -> None:
    """In a process of its own: search a file, print documents' seconds and the peak of memory in bytes."""
    seconds, found = clock(lambda: find(parquet_batches(path), parquet.read_table(held_out), RULE))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak": int(peak.split()[1]) * 1024, "hits": len(found.hits)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="most documents whose memory is measured")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    language = Language(random.Random(0))
    held_out = [" ".join(language.text(60)) for _ in range(1400)]
    for name, joint, foreign in (
        ("one line, ASCII", " ", 0.0),
        ("with paragraphs, ASCII", "\n\n", 0.0),
        ("one in ten outside ASCII", " ", 0.1),
        ("all outside ASCII", " ", 1.0),
    ):
        speed(name, list(language.documents(SPEED_DOCUMENTS, held_out, joint, foreign)), held_out)
    sizes = [10**power for power in range(4, 1 + int(math.log10(given.rows)))]
    measured = []
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        tests, documents = Path(folder, "benchmarks.parquet"), Path(folder, "documents.parquet")
        parquet.write_table(benchmarks(held_out), tests)
        texts = list(language.documents(SPEED_DOCUMENTS, held_out))
        for rows in sizes:
            write(documents, rows, texts)
            command = [sys.executable, __file__, "--measure", documents, tests]
            result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            measured.append(result)
            print(
                f"{rows:>10,} documents from Parquet: {result['seconds']:8.2f} s, peak {result['peak'] / 2**20:7.0f} MiB, "
                f"{result['hits']:,} hits, file {documents.stat().st_size / 2**20:,.0f} MiB",
                flush=True,
            )
    first, last = measured[0], measured[-1]
    steps = [math.log10(after["seconds"] / before["seconds"]) for before, after in pairwise(measured)]
    print(f"growth of time, exponent from each size to the next: {', '.join(f'{step:.2f}' for step in steps)} (with what is built once)")
    print(f"growth of memory from {sizes[0]:,} to {sizes[-1]:,} documents: {last['peak'] / first['peak']:.2f} times")


if __name__ == "__main__":
    main()
