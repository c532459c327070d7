"""Near-duplicates by MinHash and locality-sensitive hashing, and the folded text that duplicates are found on.

What      `fold` makes a question's text comparable. `find` pairs every question with an earlier one that
          it repeats: their sets of word 5-grams have at least the given Jaccard similarity, and their
          numbers and signs are the same in the same order. A question with other numbers is another
          question, however alike the words are.
How       Everything is NumPy over whole batches. The hash of a run of words is the difference of two
          prefix sums of a polynomial over the bytes. Questions share a bucket when a band of MinHashes
          and the numbers and signs agree; each is held against the questions before it in the bucket, at
          most `COMPARED`, so that the work grows as n log n whatever the data. Every pair is
          verified on its 5-grams before it counts.
Papers    Broder 1997 (MinHash); Indyk and Motwani 1998 (banding); Lee et al. (arXiv 2107.06499) for the
          use on training text.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]
    Indices = NDArray[np.int64]

SHINGLE_WORDS = 5
HASHES = 64
RECALL = 0.99
"""Least share of pairs at the threshold that some band must bring together."""
COMPARED = 8
"""Questions before it that a question is compared with in each of its buckets."""
_BATCH_TEXTS = 2048
"""Few enough for their hashes to stay in the processor's cache."""
_BATCH_PAIRS = 16384
_BATCH_BYTES = 1 << 24
_PAD = "\x02 " * (SHINGLE_WORDS - 1)
"""Words before and after a text, so that every word of it stands in as many runs as every other."""
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)

_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+")
_SUBSCRIPTS = re.compile("[₀-₉₊₋]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]")
_ALIKE = str.maketrans({"−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "×": "*", "⋅": "*", "·": "*", "÷": "/", "’": "'", "‘": "'"})
_QUOTES = re.compile("[\"“”„«»`]|(?<![^\\s(])'|'(?![^\\s).,;:?])")
_STOPS = re.compile(r"[.,;:?…]+(?=\s|$)|[¿¡]")
_HYPHENS = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")


def fold(text: str) -> str:
    """A question's text in the form in which equal questions are equal.

    Unicode form NFKC, no case, no invisible characters, one space for any white space, no quotation
    marks, no hyphens within words, no punctuation that ends a word. What carries a value stays: signs,
    points within numbers, `!`, brackets; a superscript becomes `^`, so that 2³ is not 23.
    """
    if not text.isascii():
        text = _SUPERSCRIPTS.sub(lambda found: "^" + unicodedata.normalize("NFKC", found[0]), text)
        text = _SUBSCRIPTS.sub(lambda found: "_" + unicodedata.normalize("NFKC", found[0]), text)
        text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).translate(_ALIKE)
        text = unicodedata.normalize("NFKC", text.casefold())
    else:
        text = text.lower()
    text = _HYPHENS.sub(" ", _QUOTES.sub("", text))
    return " ".join(_STOPS.sub("", text).split())


class Found(NamedTuple):
    """What `find` returns."""

    pairs: pa.Table
    """problem_id, other_problem_id (an earlier question), similarity (Jaccard): one row for each question that repeats another."""
    compared: int
    """Pairs that were verified."""
    uncompared: int
    """Places in buckets with more than `COMPARED` questions before them."""


def find(texts: pa.Table, similarity: float, progress: Callable[[int, int], None] = lambda _done, _total: None) -> Found:
    """Pair every question with the most similar earlier one that it repeats.

    texts: columns problem_id, folded, signs; in the order in which questions win. similarity: 0.5 to 1.
    """
    bands, width = banding(similarity)
    keys = np.empty((bands, texts.num_rows), np.uint64)
    done = 0
    for batch in _batches(texts):
        keys[:, done : done + batch.num_rows] = _band_keys(batch, bands, width)
        done += batch.num_rows
        progress(done, texts.num_rows)
    later, earlier, uncompared = _candidates(keys)
    del keys
    value = _similarities(texts, later, earlier)
    good = value >= similarity
    later, earlier, value = later[good], earlier[good], value[good]
    order = np.lexsort((earlier, -value, later))
    first = order[np.flatnonzero(np.diff(later[order], prepend=-1))]
    ids = texts["problem_id"]
    pairs = pa.table(
        {
            "problem_id": ids.take(pa.array(later[first])).cast(pa.string()),
            "other_problem_id": ids.take(pa.array(earlier[first])).cast(pa.string()),
            "similarity": pa.array(value[first], pa.float64()),
        }
    )
    return Found(pairs, len(good), uncompared)


def banding(similarity: float) -> tuple[int, int]:
    """Bands and MinHashes a band: the widest bands that bring pairs at the threshold together with probability `RECALL`."""
    for width in range(HASHES, 0, -1):
        bands = HASHES // width
        if 1 - (1 - similarity**width) ** bands >= RECALL:
            return bands, width
    raise ValueError(f"no banding of {HASHES} hashes finds pairs at similarity {similarity:g}; the rule is 0.5 to 1")


def _batches(texts: pa.Table) -> Iterator[pa.Table]:
    for start, stop in _pieces(_lengths(texts), _BATCH_TEXTS):
        yield texts.slice(start, stop - start)


def _lengths(texts: pa.Table) -> Indices:
    """Bytes of every folded text."""
    from pyarrow import compute

    lengths: Indices = compute.binary_length(texts["folded"]).to_numpy().astype(np.int64)
    return lengths


def _pieces(sizes: Indices, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` items whose text fits in a little memory; one that does not is a range by itself."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, min(start + most, int(np.searchsorted(ends, before + _BATCH_BYTES, "right"))))
        yield start, stop
        start = stop


# ---- hashes ---------------------------------------------------------------------------------


def _shingles(texts: pa.ChunkedArray) -> tuple[Hashes, Indices]:
    """Hash of every run of words of every text, and where the runs of each text start (one start a text)."""
    from pyarrow import compute

    large = pa.large_string()
    padded = compute.binary_join_element_wise(
        pa.scalar(_PAD, large), texts.cast(large), pa.scalar(" " + _PAD.strip(), large), pa.scalar("", large)
    )
    bytes_, offsets = _bytes_of(padded)
    spaces = np.flatnonzero(bytes_ == ord(" "))
    starts_here, ends_here = np.zeros(len(bytes_) + 1, bool), np.zeros(len(bytes_) + 1, bool)
    starts_here[spaces + 1] = starts_here[offsets[:-1]] = True
    ends_here[spaces] = ends_here[offsets[1:]] = True
    starts, ends = np.flatnonzero(starts_here), np.flatnonzero(ends_here)  # of words
    first_word = np.searchsorted(starts, offsets)
    words = np.diff(first_word)
    runs = words - SHINGLE_WORDS + 1  # the padding makes it at least one
    begin = _ranges(first_word[:-1], runs)
    return _hashes_of_spans(bytes_, starts[begin], ends[begin + SHINGLE_WORDS - 1]), np.cumsum(runs) - runs


def _bytes_of(texts: pa.ChunkedArray) -> tuple[NDArray[np.uint8], Indices]:
    """The UTF-8 bytes of all texts, one after the other, and where each text starts, with the end of the last one."""
    whole = pa.concat_arrays(texts.cast(pa.large_string()).chunks)
    _, offsets, data = whole.buffers()
    bounds = np.frombuffer(offsets, np.int64)[whole.offset : whole.offset + len(whole) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return content[bounds[0] : bounds[-1]], bounds - bounds[0]


def _hashes_of_spans(bytes_: NDArray[np.uint8], begin: Indices, end: Indices) -> Hashes:
    """Hash of the bytes of every span, alike for like spans wherever they stand."""
    powers, inverses = _powers(1 << len(bytes_).bit_length())
    sums = np.zeros(len(bytes_) + 1, np.uint64)
    np.cumsum((bytes_ + np.uint64(1)) * powers[: len(bytes_)], out=sums[1:])
    return _mixed((sums[end] - sums[begin]) * inverses[begin])


@functools.cache
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The first `count` powers of the polynomial's base, and of its inverse modulo 2^64."""
    bases = np.full((2, count), [[_BASE], [_INVERSE]], np.uint64)
    bases[:, 0] = 1
    powers, inverses = np.cumprod(bases, axis=1, dtype=np.uint64)
    return powers, inverses


def _mixed(values: Hashes) -> Hashes:
    """Every bit of a value spread over all bits (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


def _band_keys(batch: pa.Table, bands: int, width: int) -> Hashes:
    """The bucket of every text in every band, shape (bands, texts)."""
    hashes, first = _shingles(batch["folded"])
    bytes_, offsets = _bytes_of(batch["signs"])
    signs = _hashes_of_spans(bytes_, offsets[:-1], offsets[1:])
    keys = np.empty((bands, batch.num_rows), np.uint64)
    multipliers = _mixed(np.arange(1, bands * width + 1, dtype=np.uint64)) | np.uint64(1)
    permuted = np.empty_like(hashes)
    for band in range(bands):
        key = signs + np.uint64(band)
        for multiplier in multipliers[band * width : (band + 1) * width]:
            np.multiply(hashes, multiplier, out=permuted)
            key = _mixed(key ^ np.minimum.reduceat(permuted, first))
        keys[band] = key
    return keys


# ---- pairs ----------------------------------------------------------------------------------


def _candidates(keys: Hashes) -> tuple[Indices, Indices, int]:
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


def _similarities(texts: pa.Table, later: Indices, earlier: Indices) -> NDArray[np.float64]:
    """Jaccard similarity of the runs of words of each pair; 0 where numbers or signs differ."""
    from pyarrow import compute

    value = np.zeros(len(later))
    lengths = _lengths(texts)
    for start, stop in _pieces(lengths[later] + lengths[earlier], _BATCH_PAIRS):
        one, other = later[start:stop], earlier[start:stop]
        involved, at = np.unique(np.concatenate([one, other]), return_inverse=True)
        batch = texts.take(pa.array(involved))
        sets, first, sizes = _sets(batch["folded"])
        left, right = at[: len(one)], at[len(one) :]
        pair = np.concatenate([np.repeat(np.arange(len(one)), sizes[left]), np.repeat(np.arange(len(one)), sizes[right])])
        members = np.concatenate([sets[_ranges(first[left], sizes[left])], sets[_ranges(first[right], sizes[right])]])
        order = np.lexsort((members, pair))
        pair, members = pair[order], members[order]
        twice = (pair[1:] == pair[:-1]) & (members[1:] == members[:-1])
        shared = np.bincount(pair[1:][twice], minlength=len(one))
        jaccard = shared / (sizes[left] + sizes[right] - shared)
        signs = batch["signs"].combine_chunks()
        same = compute.equal(signs.take(pa.array(left)), signs.take(pa.array(right))).to_numpy(zero_copy_only=False)
        value[start:stop] = np.where(same, jaccard, 0.0)
    return value


def _sets(texts: pa.ChunkedArray) -> tuple[Hashes, Indices, Indices]:
    """The distinct runs of each text, all in one array; where each text's start, and how many they are."""
    hashes, first = _shingles(texts)
    owner = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(hashes))))
    order = np.lexsort((hashes, owner))
    hashes, owner = hashes[order], owner[order]
    new = np.ones(len(hashes), bool)
    new[1:] = (hashes[1:] != hashes[:-1]) | (owner[1:] != owner[:-1])
    sizes = np.bincount(owner[new], minlength=len(first))
    return hashes[new], np.cumsum(sizes) - sizes, sizes


def _ranges(starts: Indices, sizes: Indices) -> Indices:
    """The numbers start, start + 1, ... of every range, one after the other."""
    ends = np.cumsum(sizes)
    ranges: Indices = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    return ranges
