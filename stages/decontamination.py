"""Decontamination: which training questions overlap a benchmark question, by rules named after their source.

What      `find` streams training questions past the benchmarks and gives hits with their evidence, and counts.
          `recheck` does the same for pools that exist already, when a benchmark is added later.
Rules     same_question  equal after normalisation, whatever the length (equal problem_id, or equal folded text, as
                         duplicates are found); always on
          open_r1        any shared run of 8 words; lower case, split at white space (open-r1, scripts/decontaminate.py)
          r1             any shared run of 10 words (arXiv 2501.12948, SI D.1); it states no normalisation, so open-r1's
          gpt3           any shared run of 13 words; ASCII lower case, punctuation deleted, split at white space
                         (arXiv 2005.14165, appendix C, as EleutherAI's janitor has it)
          tulu3          more than 50 % of the benchmark question's words stand in runs of 8 words that one and the same
                         training question shares; a source that covers more than 2 % of a benchmark is flagged
                         (arXiv 2411.15124, section 3.2)
          masked_number  equal after every number is written 0: a renumbered twin
          embedding      cosine similarity of mean-pooled states of a local sentence model
Differs   gpt3 drops the whole problem where the paper cuts 200 characters around a match out of a long document.
          tulu3's tool splits with spaCy and looks runs up regardless of case; here a word is a run of word characters
          or one other mark, in lower case. A run of words that is the wording of a benchmark family and of a training
          family is no evidence, nor is a run that overlaps it (`wording_share`; null gives the rules as published).
How       Runs of words: stages/ngrams.py. Memory is that of one piece of the stream and the hits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from stages.config import Decontamination
from stages.errors import DataError
from stages.near_duplicates import fold
from stages.ngrams import MARKS_APART, PLAIN, UNPUNCTUATED, NgramRule, SharedNgrams, runs_of

if TYPE_CHECKING:
    import torch

Batches = Callable[[], Iterable[pa.RecordBatch]]
"""Questions to stream, more than once: `table.to_batches`, `parquet_batches(path)`, or a lambda over a DuckDB relation's reader.

Columns: problem_id (equal for equal normalised questions), question; family and source when they matter."""

PIECE_BYTES = 1 << 19
"""Text handled at once; what numpy holds for it stays near the processor's cache."""

HITS = pa.schema(
    {
        "rule": pa.string(),
        "problem_id": pa.string(),
        "source": pa.string(),
        "benchmark": pa.string(),
        "benchmark_problem_id": pa.string(),
        "start": pa.int64(),  # position of the first shared word, from 1; null for rules that compare whole questions
        "evidence": pa.string(),  # the first shared words, or the masked question; null otherwise
        "score": pa.float64(),  # tulu3: coverage; embedding: cosine similarity; null otherwise
    }
)
"""Grain: one row per rule, training problem and benchmark, with the strongest evidence."""

COUNTS = pa.schema(
    {
        "rule": pa.string(),
        "source": pa.string(),  # `all` is the whole training set
        "benchmark": pa.string(),
        "problems": pa.int64(),  # training problems with a hit
        "benchmark_problems": pa.int64(),  # benchmark problems that were hit
        "benchmark_size": pa.int64(),
        "share": pa.float64(),  # benchmark_problems / benchmark_size
        "flagged": pa.bool_(),  # tulu3: the share is past its limit; null for other rules
    }
)
"""Grain: one row per rule, source with a hit (and `all`) and benchmark."""


class Findings(NamedTuple):
    """What a search found: `hits` (schema HITS) and `counts` (schema COUNTS)."""

    hits: pa.Table
    counts: pa.Table


class Evidence(NamedTuple):
    """Why a training question overlaps one benchmark question; fields as in HITS."""

    start: int | None = None
    text: str | None = None
    score: float | None = None


Finder = Callable[[pa.RecordBatch], Iterator[tuple[int, Mapping[int, Evidence]]]]
"""Rows of a piece that overlap benchmark problems: row, and evidence by row of the benchmark table."""


# ---- runs of words --------------------------------------------------------------------------


def ngram_rules(ngram: int) -> dict[str, NgramRule]:
    """The rules on runs of words by name; `ngram` is the length for `open_r1` (there 8)."""
    return {
        "open_r1": NgramRule(ngram, PLAIN),
        "tulu3": NgramRule(8, MARKS_APART),
        "r1": NgramRule(10, PLAIN),
        "gpt3": NgramRule(13, UNPUNCTUATED),
    }


MIN_WORDING_QUESTIONS = {"benchmark": 2, "training": 10}
"""Questions of a family that must hold a run before it can be the family's wording."""


def wording(problems: Batches, candidates: pa.Table, rules: Mapping[str, NgramRule], share: float) -> dict[str, set[str]]:
    """By rule: runs of words that tell no question of a family from the next.

    Those in more than `share` of some benchmark family's questions (two at least) and in more than `share` of some
    training family's (ten at least). `share` is well above a tenth, because the first number of a question follows its
    wording, and a one-digit number must stay content; both sides, because a passage that many benchmark questions quote is
    content as long as few training questions quote it, and a question that leaked once is never a large part of its family.
    """
    questions = list(zip(_texts(candidates, "family"), candidates["question"].to_pylist(), strict=True))
    sizes = Counter(family for family, _ in questions)
    searches: dict[str, SharedNgrams] = {}
    for name, rule in rules.items():
        held = Counter((family, run) for family, question in questions for run in set(runs_of(question, rule)))
        least = MIN_WORDING_QUESTIONS["benchmark"]
        common = {run for (family, run), count in held.items() if count >= least and count > share * sizes[family]}
        searches[name] = SharedNgrams(common, rule)
    if not any(search.ngrams for search in searches.values()):
        return {name: set() for name in rules}
    training_sizes: Counter[str] = Counter()
    training_held: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in rules}
    for piece in pieces(problems):
        families = _texts(piece, "family")
        training_sizes.update(families)
        for name, search in searches.items():
            for row, found in search(piece["question"]):
                training_held[name].update((families[row], run) for run in {run for _, run in found})
    least = MIN_WORDING_QUESTIONS["training"]
    return {
        name: {run for (family, run), count in held.items() if count >= least and count > share * training_sizes[family]}
        for name, held in training_held.items()
    }


class NgramFinder:
    """Finder of a rule on runs of words; with `coverage`, of those benchmark questions only that are covered beyond it."""

    def __init__(self, benchmarks: pa.Table, rule: NgramRule, templates: set[str], coverage: float | None = None) -> None:
        self.rule, self.templates, self.coverage = rule, templates, coverage
        self.places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        questions = benchmarks["question"].to_pylist()
        for index, question in enumerate(questions):
            for start, run in enumerate(runs_of(question, rule)):
                self.places[run].append((index, start))
        self.lengths = [len(rule.split.words(question)) for question in questions] if coverage is not None else []
        self.shared = SharedNgrams(self.places.keys() | templates, rule)

    def __call__(self, piece: pa.RecordBatch) -> Iterator[tuple[int, Mapping[int, Evidence]]]:
        for row, found in self.shared(piece["question"]):
            content = self._content(found)
            matches: dict[int, Evidence] = {}
            for start, run in content:
                for index, _ in self.places.get(run, ()):
                    matches.setdefault(index, Evidence(start, run))
            if self.coverage is not None:
                covered = self._covered({run for _, run in content})
                matches = {index: matches[index]._replace(score=score) for index, score in covered.items() if score > self.coverage}
            if matches:
                yield row, matches

    def _content(self, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """The shared runs that overlap no wording."""
        worded = [start for start, run in found if run in self.templates]
        return [(start, run) for start, run in found if all(abs(start - other) >= self.rule.n for other in worded)] if worded else found

    def _covered(self, runs: set[str]) -> dict[int, float]:
        """By benchmark question: the share of its words that stand in the runs."""
        starts: dict[int, list[int]] = defaultdict(list)
        for index, start in (place for run in runs for place in self.places.get(run, ())):
            starts[index].append(start)
        return {index: _union(sorted(found), self.rule.n) / self.lengths[index] for index, found in starts.items()}


def _union(starts: list[int], n: int) -> int:
    """How many positions the runs of n that begin at `starts` (ascending) cover together."""
    return n + sum(min(n, after - before) for before, after in pairwise(starts))


# ---- whole questions ------------------------------------------------------------------------

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def masked(question: str) -> str:
    """A question in open-r1's normalisation, every number written 0."""
    return NUMBER.sub("0", " ".join(PLAIN.words(question)))


def _same_question(benchmarks: pa.Table) -> Finder:
    by_id: dict[str, list[int]] = defaultdict(list)
    by_text: dict[str, list[int]] = defaultdict(list)
    for index, (problem, question) in enumerate(zip(*(benchmarks[name].to_pylist() for name in ("problem_id", "question")), strict=True)):
        by_id[problem].append(index)
        if folded := fold(question):
            by_text[folded].append(index)

    def found(piece: pa.RecordBatch) -> Iterator[tuple[int, Mapping[int, Evidence]]]:
        for row, (problem, question) in enumerate(zip(piece["problem_id"].to_pylist(), piece["question"].to_pylist(), strict=True)):
            if same := [*by_id.get(problem, ()), *by_text.get(fold(question), ())]:
                yield row, dict.fromkeys(same, Evidence())

    return found


def _masked_number(benchmarks: pa.Table) -> Finder:
    where: dict[str, list[int]] = defaultdict(list)
    ids = benchmarks["problem_id"].to_pylist()
    for index, question in enumerate(benchmarks["question"].to_pylist()):
        where[masked(question)].append(index)

    def found(piece: pa.RecordBatch) -> Iterator[tuple[int, Mapping[int, Evidence]]]:
        for row, question in enumerate(piece["question"].to_pylist()):
            if twins := where.get(text := masked(question)):
                own = piece["problem_id"][row].as_py()
                if matches := {index: Evidence(text=text) for index in twins if ids[index] != own}:
                    yield row, matches

    return found


def _embedding(benchmarks: pa.Table, settings: Decontamination) -> Finder:
    encode = sentence_encoder(settings)
    targets = encode(benchmarks["question"].to_pylist())

    def found(piece: pa.RecordBatch) -> Iterator[tuple[int, Mapping[int, Evidence]]]:
        similarity = encode(piece["question"].to_pylist()) @ targets.T
        near = similarity >= settings.embedding_similarity
        for row in np.flatnonzero(near.any(axis=1)).tolist():
            yield row, {index: Evidence(score=float(similarity[row, index])) for index in np.flatnonzero(near[row]).tolist()}

    return found


def sentence_encoder(settings: Decontamination) -> Callable[[list[str]], NDArray[np.float32]]:
    """A function from texts to unit vectors, shape (texts, width): the mean of the model's last states over a text's tokens.

    Raises DataError when `embedding_model` is no folder that transformers can load; code from it is never run.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = settings.embedding_model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if folder is None or not folder.is_dir():
            raise OSError("there is no such folder")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        model = AutoModel.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).to(device)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"decontamination: embedding_model {folder} cannot be loaded ({error}); the rule is a local folder with config.json, "
            "tokenizer and *.safetensors; mend the path, or leave the rule embedding out"
        ) from error
    model.eval()

    def means(texts: list[str]) -> torch.Tensor:
        inputs = tokenizer(
            texts, padding=True, padding_side="right", truncation=True, max_length=settings.embedding_max_tokens, return_tensors="pt"
        ).to(device)
        states = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def encode(texts: list[str]) -> NDArray[np.float32]:
        size = settings.embedding_batch_size
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # texts of like length share a batch
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for first in range(0, len(order), size):
                chosen = order[first : first + size]
                vectors[chosen] = means([texts[index] for index in chosen]).cpu().numpy()
        return vectors

    return encode


# ---- the search -----------------------------------------------------------------------------


def find(
    problems: Batches, benchmarks: pa.Table, settings: Decontamination, *, ngram: int = 8, candidates: pa.Table | None = None
) -> Findings:
    """Hold training problems against benchmark problems by `same_question` and every rule of the settings.

    `benchmarks` has the columns benchmark, problem_id, question (and family). `ngram` is the number of words for `open_r1`.
    `candidates` are questions on which the benchmark families' wording is measured, when more are known than were taken.
    Raises DataError for a missing column, a question that is null, and a sentence model that cannot be loaded.
    """
    _require(benchmarks, ("benchmark", "problem_id", "question"), "benchmarks")
    runs: dict[str, NgramRule] = {name: rule for name, rule in ngram_rules(ngram).items() if name in settings.rules}
    offered = benchmarks if candidates is None else candidates
    templates = wording(problems, offered, runs, settings.wording_share) if settings.wording_share is not None and runs else {}
    finders: dict[str, Finder] = {"same_question": _same_question(benchmarks)}
    for name in settings.rules:
        if name in runs:
            coverage = settings.tulu3_coverage if name == "tulu3" else None
            finders[name] = NgramFinder(benchmarks, runs[name], templates.get(name, set()), coverage)
        else:
            finders[name] = _masked_number(benchmarks) if name == "masked_number" else _embedding(benchmarks, settings)
    names, ids = benchmarks["benchmark"].to_pylist(), benchmarks["problem_id"].to_pylist()
    batches: list[pa.RecordBatch] = []
    hit: Counter[tuple[str, str, str]] = Counter()
    touched: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for piece in pieces(problems):
        sources = _texts(piece, "source")
        rows: list[tuple[Any, ...]] = []
        for rule, finder in finders.items():
            for row, matches in finder(piece):
                problem = piece["problem_id"][row].as_py()
                strongest: dict[str, tuple[tuple[float, int, str], Evidence]] = {}
                for index, evidence in matches.items():
                    touched[rule, sources[row], names[index]].add(index)
                    place = (-(evidence.score or 0.0), evidence.start or 0, ids[index])
                    if names[index] not in strongest or place < strongest[names[index]][0]:
                        strongest[names[index]] = (place, evidence)
                for benchmark, ((_, _, other), evidence) in strongest.items():
                    hit[rule, sources[row], benchmark] += 1
                    rows.append((rule, problem, sources[row], benchmark, other, *evidence))
        if rows:
            columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), HITS, strict=True)]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=HITS))
    hits = pa.Table.from_batches(batches, HITS).sort_by([("rule", "ascending"), ("problem_id", "ascending"), ("benchmark", "ascending")])
    return Findings(hits, _counts(finders, hit, touched, Counter(names), settings))


def _counts(
    rules: Iterable[str],
    hit: Counter[tuple[str, str, str]],
    touched: Mapping[tuple[str, str, str], set[int]],
    sizes: Counter[str],
    settings: Decontamination,
) -> pa.Table:
    keys = [(rule, "all", benchmark) for rule in rules for benchmark in sorted(sizes)] + sorted(touched)
    rows = []
    for rule, source, benchmark in keys:
        merged = [key for key in touched if key[0] == rule and key[2] == benchmark and source in ("all", key[1])]
        found = len(set[int]().union(*(touched[key] for key in merged)))
        share = found / sizes[benchmark]
        flagged = share > settings.tulu3_flagged_share if rule == "tulu3" else None
        rows.append((rule, source, benchmark, sum(hit[key] for key in merged), found, sizes[benchmark], share, flagged))
    return pa.Table.from_pylist([dict(zip(COUNTS.names, row, strict=True)) for row in rows], COUNTS)


def pieces(problems: Batches) -> Iterator[pa.RecordBatch]:
    """The stream, cut so that the questions of a piece have about PIECE_BYTES; a longer question is a piece by itself.

    Questions come as large_string. Raises DataError for a missing column and a question that is null.
    """
    for batch in problems():
        if not len(batch):
            continue
        _require(batch, ("problem_id", "question"), "training problems")
        questions = batch["question"].cast(pa.large_string())
        whole = batch.set_column(batch.schema.get_field_index("question"), "question", questions)
        bounds = np.frombuffer(questions.buffers()[1], np.int64)[questions.offset : questions.offset + len(questions) + 1]
        first = 0
        while first < len(batch):
            after = max(first + 1, int(np.searchsorted(bounds, bounds[first] + PIECE_BYTES, "right")) - 1)
            yield whole.slice(first, after - first)
            first = after


def _require(table: pa.Table | pa.RecordBatch, columns: tuple[str, ...], what: str) -> None:
    for column in columns:
        if column not in table.schema.names:
            raise DataError(f"decontamination: {what} have no column {column!r}, only {table.schema.names}; the rule is {columns}; add it")
        if count := table[column].null_count:
            raise DataError(f"decontamination: {count} {what} have no {column}; the rule is one in every row; drop these rows first")


def _texts(table: pa.Table | pa.RecordBatch, column: str) -> list[str]:
    """A column's values; where there is no such column, or no value, an empty text."""
    if column not in table.schema.names:
        return [""] * len(table)
    return [value or "" for value in table[column].to_pylist()]


# ---- pools that exist -----------------------------------------------------------------------


def parquet_batches(path: Path, *, source: str | None = None) -> Batches:
    """The problems of a Parquet file as a stream; `source`, when given, stands in place of what the file says.

    Raises DataError, when it is streamed, for a file that cannot be read.
    """

    def read() -> Iterator[pa.RecordBatch]:
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path, pre_buffer=False) as file:  # else the whole file would be held
                columns = [name for name in ("problem_id", "question", "family", "source") if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=1 << 14, columns=columns):
                    yield batch if source is None else _labelled(batch, source)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"decontamination: {path} cannot be read as Parquet ({error}); name a pool's file") from error

    return read


def _labelled(batch: pa.RecordBatch, source: str) -> pa.RecordBatch:
    kept = batch.drop_columns(["source"]) if "source" in batch.schema.names else batch
    return kept.append_column("source", pa.array([source] * len(batch), pa.string()))


def recheck(pools: Mapping[str, Path], benchmarks: pa.Table, settings: Decontamination, *, ngram: int = 8) -> Findings:
    """Hold pools that exist (name to Parquet file) against benchmarks, as after a benchmark was added.

    `source` is the pool's name in hits and counts; hits carry both texts in two more columns, question and benchmark_question.
    Raises DataError as `find` does, and for a file that cannot be read.
    """
    streams = [parquet_batches(path, source=name) for name, path in pools.items()]

    def problems() -> Iterator[pa.RecordBatch]:
        for stream in streams:
            yield from stream()

    found = find(problems, benchmarks, settings, ngram=ngram)
    return Findings(with_texts(found.hits, problems, benchmarks), found.counts)


def with_texts(hits: pa.Table, problems: Batches, benchmarks: pa.Table) -> pa.Table:
    """Hits with the training question and the benchmark question beside them."""
    wanted = hits["problem_id"].unique()
    asked: dict[str, str] = {}
    for batch in problems():
        chosen = batch.select(["problem_id", "question"]).filter(compute.is_in(batch["problem_id"], value_set=wanted))
        asked.update(zip(*(column.to_pylist() for column in chosen.columns), strict=True))
    held_out = dict(zip(benchmarks["problem_id"].to_pylist(), benchmarks["question"].to_pylist(), strict=True))
    questions = [asked[problem] for problem in hits["problem_id"].to_pylist()]
    others = [held_out[problem] for problem in hits["benchmark_problem_id"].to_pylist()]
    texts = {"question": questions, "benchmark_question": others}
    for name, column in texts.items():
        hits = hits.append_column(name, pa.array(column, pa.string()))
    return hits
