"""Finding a name by its parts. Pure text, no files.

A name falls into words at everything that is neither letter nor digit, and words fall into pieces between
letters and digits; a version such as ``3.8`` is one piece. ``Qwen3.8-27B`` is
``qwen``, ``3.8``, ``27``, ``b``.
"""

from __future__ import annotations

import difflib
import enum
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_QUERY_CHARACTERS = 200
MAX_SUGGESTIONS = 5

_PIECE = re.compile(r"\d+(?:\.\d+)*|[^\W\d_]+")


class Fit(enum.IntEnum):
    """How well a query fits a name, best first."""

    EXACT = 0  # every word of the query is one or more whole pieces
    PREFIX = 1  # some word only begins a piece
    NONE = 2


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    begins_word: bool

    @property
    def is_number(self) -> bool:
        return self.text[0].isdigit()


def fold(text: str) -> str:
    """Text for comparisons that ignore case and the ways Unicode has to write the same letter."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def same_pieces(query: str, name: str) -> bool:
    """Both consist of the same pieces, whatever separates them."""
    wanted = [piece.text for piece in _pieces(query)]
    return bool(wanted) and wanted == [piece.text for piece in _pieces(name)]


def fit(query: str, name: str) -> Fit:
    """How well the words of the query, in any order, fit the name."""
    words = _words(query)
    if not words or len(query) > MAX_QUERY_CHARACTERS:
        return Fit.NONE
    pieces = _pieces(name)
    return max(_fit_word(word, pieces) for word in words)


def suggestions(query: str, names: Iterable[str]) -> list[str]:
    """Names that somebody may have meant: similar spelling first, then those that share a word."""
    short = fold(query)[:MAX_QUERY_CHARACTERS]
    by_folded = {fold(name): name for name in names}
    similar = difflib.get_close_matches(short, by_folded, n=MAX_SUGGESTIONS, cutoff=0.5)
    words = _words(short)
    sharing = [
        folded
        for folded, name in by_folded.items()
        if any(_fit_word(word, _pieces(name)) is not Fit.NONE for word in words)
    ]
    found = dict.fromkeys(similar + sharing)  # without repetitions, in order
    return [by_folded[folded] for folded in found][:MAX_SUGGESTIONS]


def _pieces(text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    end = -1
    for match in _PIECE.finditer(fold(text)):
        pieces.append(_Piece(match[0], match.start() != end))
        end = match.end()
    return pieces


def _words(text: str) -> list[list[_Piece]]:
    words: list[list[_Piece]] = []
    for piece in _pieces(text[:MAX_QUERY_CHARACTERS]):
        if piece.begins_word:
            words.append([])
        words[-1].append(piece)
    return words


def _fit_word(word: Sequence[_Piece], pieces: Sequence[_Piece]) -> Fit:
    return min(
        (_fit_at(word, pieces[start : start + len(word)]) for start in range(len(pieces))), default=Fit.NONE
    )


def _fit_at(word: Sequence[_Piece], pieces: Sequence[_Piece]) -> Fit:
    if len(pieces) < len(word):
        return Fit.NONE
    for index, (wanted, piece) in enumerate(zip(word, pieces, strict=True)):
        # "llama3" is Llama-3, but "27b" is not 27-Base: only a number may follow in the next word.
        if index and piece.begins_word and not piece.is_number:
            return Fit.NONE
        if wanted.text == piece.text:
            continue
        # A number is never the beginning of a longer one: 2 is not 27, though 3 is 3.8.
        beginning = wanted.text + "." if wanted.is_number else wanted.text
        last = index == len(word) - 1
        return Fit.PREFIX if last and piece.text.startswith(beginning) else Fit.NONE
    return Fit.EXACT
