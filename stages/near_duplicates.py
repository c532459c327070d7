"""Near-duplicates by MinHash and locality-sensitive hashing, and the folded text that duplicates are found on.

What      `fold` makes a question's text comparable. `find` pairs every question with an earlier one that
          it repeats: their sets of word 5-grams have at least the given Jaccard similarity, and their
          numbers and signs are the same in the same order, and so are their answers. A question with other
          numbers, or with another answer, is another question, however alike the words are.
How       rensa makes the MinKeys. Questions share a bucket when a band of MinKeys and the numbers and
          signs agree; each is held against the questions before it in the bucket, at most `COMPARED`, so that the
          work grows as n log n whatever the data. Every pair is verified on its 5-grams before it counts.
Papers    Broder 1997 (MinHash); Indyk and Motwani 1998 (banding); Lee et al. (arXiv 2107.06499) for the
          use on training text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Indices = NDArray[np.int64]

SHINGLE_WORDS = 5
HASHES = 64
RECALL = 0.99
"""Least share of pairs at the threshold that some band must bring together."""
COMPARED = 8
"""Questions before it that a question is compared with in each of its buckets."""
_PAIRS = pa.schema({"problem_id": pa.string(), "other_problem_id": pa.string(), "similarity": pa.float64()})
_SEED = 42
_BATCH = 4096
_PAD = ["\x02"] * (SHINGLE_WORDS - 1)
"""Words before and after a text, so that every word of it stands in as many runs as every other."""


def _decomposed(kind: str) -> re.Pattern[str]:
    """Runs of the characters that Unicode decomposes as `kind`; all of them lie below U+20000."""
    return re.compile(f"[{''.join(chr(code) for code in range(0xA0, 0x20000) if unicodedata.decomposition(chr(code)).startswith(kind))}]+")


_SUPERSCRIPTS = _decomposed("<super>")
_SUBSCRIPTS = _decomposed("<sub>")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]")
_ALIKE = str.maketrans({"−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "×": "*", "⋅": "*", "·": "*", "÷": "/", "’": "'", "‘": "'"})
_QUOTES = re.compile('["“”„«»¿¡]')
_APOSTROPHES = re.compile("['`]+")
_STOPS = re.compile(r"[.,;:?…](?<=[^\s.,;:?…].)[.,;:?…]*+(?=\s)")  # begins where no stop stands before: linear in the text
_HYPHENS = re.compile(r"-(?<=[^\W\d_]{2}-)(?=[^\W\d_]{2})")


def fold(text: str) -> str:
    """A question's text in the form in which equal questions are equal.

    Unicode form NFKC, no case, no invisible characters, one space for any white space, no quotation
    marks, no hyphens within words, no punctuation that ends a word or the text. What carries a value stays:
    signs, points within numbers and between spaces, `!`, brackets, an apostrophe that closes no quotation
    (f'); a superscript becomes `^`, a subscript `_`, so that 2³ is not 23. Work is linear in the length.
    """
    if not text.isascii():
        text = _SUPERSCRIPTS.sub(lambda found: "^" + unicodedata.normalize("NFKC", found[0]), text)
        text = _SUBSCRIPTS.sub(lambda found: "_" + unicodedata.normalize("NFKC", found[0]), text)
        text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).translate(_ALIKE)
        text = unicodedata.normalize("NFKC", text.casefold())
    else:
        text = text.lower()
    text = _HYPHENS.sub(" ", _unquoted(_QUOTES.sub("", text)))
    return " ".join(_STOPS.sub("", text).split()).rstrip(" .,;:?…")


def _unquoted(text: str) -> str:
    """The text without apostrophes that open a word, and without those that end one while a quotation is open."""
    is_open = False

    def kept(found: re.Match[str]) -> str:
        nonlocal is_open
        before, after = text[max(found.start() - 1, 0) : found.start()], text[found.end() : found.end() + 1]
        opens = "`" in found[0] or not before or before.isspace() or before == "("
        ends = after in ").,;:?" or after.isspace()
        is_quote = opens or (ends and is_open)
        if is_quote:
            is_open = opens
        return "" if is_quote else found[0]

    return _APOSTROPHES.sub(kept, text)


class Found(NamedTuple):
    """What `find` returns."""

    pairs: pa.Table
    """problem_id, other_problem_id (an earlier question), similarity (Jaccard): one row for each question that repeats another."""
    other_answer: int
    """Questions as alike to an earlier one, but to none with the same answer."""
    compared: int
    """Pairs that were verified."""
    uncompared: int
    """Places in buckets with more than `COMPARED` questions before them."""


def find(texts: pa.Table, similarity: float, progress: Callable[[int, int], None] = lambda _done, _total: None) -> Found:
    """Pair every question with the most similar earlier one that it repeats.

    texts: columns problem_id, folded, signs, answer; in the order in which questions win. similarity: 0.5 to 1, or 0 for no pairs.
    """
    if not similarity:
        return Found(_PAIRS.empty_table(), 0, 0, 0)
    bands, width = banding(similarity)
    keys = np.empty((bands, texts.num_rows), np.uint64)
    done = 0
    for batch in texts.to_batches(_BATCH):
        keys[:, done : done + batch.num_rows] = _band_keys(batch, bands, width)
        done += batch.num_rows
        progress(done, texts.num_rows)
    later, earlier, uncompared = _candidates(keys)
    del keys
    best: dict[int, tuple[float, int]] = {}
    others: set[int] = set()
    signs, answers = texts["signs"], texts["answer"]
    for one, other in zip(later.tolist(), earlier.tolist(), strict=True):
        if signs[one].equals(signs[other]):
            value = jaccard(*(shingles(texts["folded"][index].as_py()) for index in (one, other)))
            if value >= similarity and not answers[one].equals(answers[other]):
                others.add(one)
            elif value >= similarity and value > best.get(one, (0.0, 0))[0]:
                best[one] = value, other
    ids = texts["problem_id"]
    rows = [(ids[one].as_py(), ids[other].as_py(), value) for one, (value, other) in sorted(best.items())]
    pairs = pa.Table.from_pylist([dict(zip(_PAIRS.names, row, strict=True)) for row in rows], _PAIRS)
    return Found(pairs, len(others - best.keys()), len(later), uncompared)


def shingles(folded: str) -> set[str]:
    """The runs of words of a folded text."""
    words = [*_PAD, *folded.split(" "), *_PAD]
    return set(map(" ".join, zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False)))


def jaccard(one: set[str], other: set[str]) -> float:
    """What two sets have in common, as a share of what they have together."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def banding(similarity: float) -> tuple[int, int]:
    """Bands and MinHashes a band: the widest bands that bring pairs at the threshold together with probability `RECALL`."""
    for width in range(HASHES, 0, -1):
        bands = HASHES // width
        if 1 - (1 - similarity**width) ** bands >= RECALL:
            return bands, width
    raise ValueError(f"no banding of {HASHES} hashes finds pairs at similarity {similarity:g}; the rule is 0.5 to 1")


def _band_keys(batch: pa.RecordBatch, bands: int, width: int) -> Keys:
    """The bucket of every text in every band, shape (bands, texts)."""
    from rensa import RMinHash

    sets = [list(shingles(text)) for text in batch["folded"].to_pylist()]
    hashes = np.array(RMinHash.digest_matrix_from_token_sets(sets, HASHES, _SEED).to_rows(), np.uint64)
    signs = np.array(RMinHash.hash_token_sets([[text] for text in batch["signs"].to_pylist()]), np.uint64)[:, 0]
    keys = np.empty((bands, batch.num_rows), np.uint64)
    for band in range(bands):
        keys[band] = signs + np.uint64(band)
        for column in range(band * width, (band + 1) * width):
            keys[band] = _mixed(keys[band] ^ hashes[:, column])
    return keys


def _mixed(values: Keys) -> Keys:
    """Every bit of a value spread over all bits (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = values ^ (values >> np.uint64(31))
    return mixed


def _candidates(keys: Keys) -> tuple[Indices, Indices, int]:
    """Pairs (later, earlier) of texts that share a bucket, each once; and how many places have more than `COMPARED` before them."""
    count = keys.shape[1]
    found: list[Indices] = [np.empty(0, np.int64)]
    uncompared = 0
    for key in keys:
        order = np.argsort(key, kind="stable")  # stable: within a bucket the earlier text stays first
        sorted_ = key[order]
        alone = np.flatnonzero(sorted_[1:] == sorted_[:-1])
        for back in range(1, COMPARED + 2):
            at = alone[alone + 1 >= back] + 1
            same = at[sorted_[at] == sorted_[at - back]]
            if back > COMPARED:
                uncompared += len(same)
            elif len(same):
                found.append(order[same].astype(np.int64) * count + order[same - back])
    pairs = np.unique(np.concatenate(found))
    return pairs // max(count, 1), pairs % max(count, 1), uncompared
