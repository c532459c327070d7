"""Runs of words that texts share with given ones: exact, and fast enough for millions of texts.

How       One compiled pass over the bytes of many texts splits them into words and hashes every run of n words, each
          from the one before (a rolling polynomial modulo 2^64). A hash passes a table of bits, then an open table of
          64-bit hashes; what is left is looked up as words in plain Python, so a collision is never a hit. Texts with
          characters that Python splits or lowers in a way of its own are put into plain words first. The kernels are
          compiled at their first call and kept beside this file where that can be written.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

Indices = NDArray[np.int64]


class Split(NamedTuple):
    """How a text falls into words.

    A text without a `foreign` character falls into the same words when it is taken byte by byte, each byte of ASCII doing what it
    does between two letters; so do words joined by spaces.
    """

    words: Callable[[str], list[str]]
    foreign: Callable[[str], bool]
    """Of a character outside ASCII."""


_JANITOR = str.maketrans(string.ascii_uppercase, string.ascii_lowercase, string.punctuation)

PLAIN = Split(lambda text: text.lower().split(), lambda char: char.isspace() or char != char.lower())
UNPUNCTUATED = Split(lambda text: text.translate(_JANITOR).split(), str.isspace)
MARKS_APART = Split(lambda text: re.findall(r"\w+|[^\w\s]", text.lower()), lambda char: True)


class NgramRule(NamedTuple):
    """A rule on runs of `n` words."""

    n: int
    split: Split


def runs_of(text: str, rule: NgramRule) -> list[str]:
    """Every run of words of a text, joined by spaces, in order."""
    words = rule.split.words(text)
    return [" ".join(words[start : start + rule.n]) for start in range(len(words) - rule.n + 1)]


class SharedNgrams:
    """Finds the runs of words that texts share with given ones."""

    def __init__(self, ngrams: Collection[str], rule: NgramRule) -> None:
        """`ngrams`: runs as `runs_of` gives them."""
        self.ngrams, self.rule = ngrams, rule
        self.spelling = _Spelling.of(rule.split)
        self.known = _Known.of_size(len(ngrams))
        _runs_in(pa.array(ngrams, pa.large_string()), rule, self.spelling, self.known, enters=True)

    def __call__(self, texts: pa.Array) -> Iterator[tuple[int, list[tuple[int, str]]]]:
        """Row of each text (large_string) that shares a run, with position of its first word (from 1) and words of every shared run."""
        n = self.rule.n
        rows, places = _runs_in(texts, self.rule, self.spelling, self.known, enters=False)
        for row, group in groupby(zip(rows.tolist(), places.tolist(), strict=True), key=itemgetter(0)):
            words = self.rule.split.words(texts[row].as_py())
            runs = [(place + 1, " ".join(words[place : place + n])) for _, place in group]
            if found := [(start, run) for start, run in runs if run in self.ngrams]:
                yield row, found


def _content(texts: pa.Array, split: Split) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of all texts (large_string), foreign ones put into plain words, and where each starts, with the end of the last."""
    codes, bounds = _bytes_of(texts)
    beyond = codes[codes > 127]
    if len(beyond) and (foreign := [char for char in set(beyond.tobytes().decode()) if split.foreign(char)]):
        chosen = compute.match_substring_regex(texts, f"[{''.join(foreign)}]")
        spelled = [" ".join(split.words(text)) for text in texts.filter(chosen).to_pylist()]
        codes, bounds = _bytes_of(compute.replace_with_mask(texts, chosen, pa.array(spelled, texts.type)))
    return codes, bounds


def _bytes_of(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    codes = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return codes[bounds[0] : bounds[-1]], bounds - bounds[0]


# ---- the compiled passes ---------------------------------------------------------------------

_SPACE = np.uint8(ord(" "))
_PAD = 8
"""Bytes before the first word and after the last, so that eight can be read at once wherever a word is."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_LAST = np.array([(1 << 64) - (1 << 64 - 8 * count) for count in range(9)], np.uint64)
"""Masks that keep the first, or the last, `count` of eight bytes."""
_BITS_A_RUN, _PLACES_A_RUN = 32, 4
_CACHED = os.access(Path(__file__).parent, os.W_OK)


class _Spelling(NamedTuple):
    """What becomes of each byte: the byte that stands for it, whether it stays, and whether it is a word by itself."""

    byte: NDArray[np.uint8]
    stays: NDArray[np.uint8]
    apart: NDArray[np.uint8]

    @classmethod
    def of(cls, split: Split) -> _Spelling:
        """As the split shows it between two letters."""
        spelling = cls(np.arange(256, dtype=np.uint8), np.ones(256, np.uint8), np.zeros(256, np.uint8))
        for code in range(128):
            match split.words(f"a{chr(code)}a"):
                case ["a", "a"]:
                    spelling.byte[code] = _SPACE
                case ["aa"]:
                    spelling.stays[code] = 0
                case [word]:
                    spelling.byte[code] = ord(word[1])
                case _:
                    spelling.apart[code] = 1
        return spelling


class _Known(NamedTuple):
    """Hashes of runs, in two tables whose sizes are powers of two."""

    bits: NDArray[np.uint8]
    hashes: NDArray[np.uint64]

    @classmethod
    def of_size(cls, runs: int) -> _Known:
        bits, places = (1 << max(10, (each * runs).bit_length()) for each in (_BITS_A_RUN, _PLACES_A_RUN))
        return cls(np.zeros(bits // 8, np.uint8), np.zeros(places, np.uint64))


def _runs_in(texts: pa.Array, rule: NgramRule, spelling: _Spelling, known: _Known, *, enters: bool) -> tuple[Indices, Indices]:
    """Enter the hash of every run of n words into the tables, or find those that stand there: text and first word of each."""
    content, bounds = _content(texts, rule.split)
    longest = int(np.diff(bounds).max(initial=0))
    buffer = np.empty(3 * longest + 2 * _PAD, np.uint8)
    eight = np.ndarray((len(buffer) - 7,), np.uint64, buffer, strides=(1,))  # eight bytes from every position on
    found: tuple[Indices, Indices] = _pass(content, bounds, *spelling, buffer, eight, rule.n, *known, enters)
    return found


@numba.njit(cache=_CACHED)
def _spell_plainly(text, byte, buffer, ends):  # type: ignore[no-untyped-def]
    """`_spell` where every byte stays and none is a word by itself."""
    spaces = np.uint64(0)
    for i in range(len(text)):
        code = byte[text[i]]
        buffer[i + _PAD] = code
        ends[spaces] = i + _PAD
        spaces += np.uint64(code == _SPACE)
    ends[spaces] = len(text) + _PAD
    return spaces


@numba.njit(cache=_CACHED)
def _spell(text, byte, stays, apart, buffer, ends):  # type: ignore[no-untyped-def]
    """Write a text as its words are spelled, and where each ends. Returns the spaces between them.

    Without a branch, since a wrong guess costs more than all else.
    """
    spaces, at = 0, _PAD
    for code in text:
        for before in (True, False):
            if not before:
                buffer[at] = byte[code]
                ends[spaces] = at
                spaces += byte[code] == _SPACE
                at += stays[code]
            buffer[at] = _SPACE
            ends[spaces] = at
            spaces += apart[code]
            at += apart[code]
    ends[spaces] = at
    return spaces


@numba.njit(cache=_CACHED)
def _pass(content, bounds, byte, stays, apart, buffer, eight, n, bits, hashes, enters):  # type: ignore[no-untyped-def]
    most = 0 if enters else len(content) // 2 + len(bounds)
    rows, places, found = np.empty(most, np.int64), np.empty(most, np.int64), 0
    ends, ring = np.empty(len(buffer), np.int64), np.empty(n, np.uint64)
    leaving = np.uint64(1)
    for _ in range(n):
        leaving *= _ODD
    plain = np.all(stays == 1) and not np.any(apart)
    for row in range(len(bounds) - 1):
        text = content[bounds[row] : bounds[row + 1]]
        spaces = _spell_plainly(text, byte, buffer, ends) if plain else _spell(text, byte, stays, apart, buffer, ends)
        ring[:] = 0
        run = np.uint64(0)
        count = slot = 0
        stop = _PAD - 1
        for end in ends[: spaces + 1]:
            start, stop = stop + 1, end
            if stop == start:
                continue
            size = min(stop - start, 8)
            word = (eight[start] & _FIRST[size]) * _ODD
            word ^= word >> np.uint64(29)
            word += eight[stop - 8] & _LAST[size]
            for middle in range(start + 8, stop - 8, 8):
                word = (word ^ (word >> np.uint64(32))) * _ODD + eight[middle]
            word *= _ODD
            word ^= word >> np.uint64(32)
            run = run * _ODD + word - ring[slot] * leaving
            ring[slot] = word
            slot = slot + 1 if slot + 1 < n else 0
            count += 1
            if count < n:
                continue
            key = (run ^ (run >> np.uint64(32))) * _ODD | np.uint64(1)
            bit = (key >> np.uint64(32)) & np.uint64(8 * len(bits) - 1)
            cell, mask = bit >> np.uint64(3), np.uint8(1 << (bit & np.uint64(7)))
            if enters:
                bits[cell] |= mask
            elif not bits[cell] & mask:
                continue
            at = np.int64((key >> np.uint64(8)) & np.uint64(len(hashes) - 1))
            while hashes[at] != 0 and hashes[at] != key:
                at = (at + 1) & (len(hashes) - 1)
            if enters:
                hashes[at] = key
            elif hashes[at] == key:
                rows[found], places[found] = row, count - n
                found += 1
    return rows[:found], places[:found]
