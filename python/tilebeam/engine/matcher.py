"""Grammars for the native matcher: read once for a vocabulary, then one `Matcher` for each sequence."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from functools import partial
from itertools import accumulate, chain
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from tilebeam.errors import GrammarTooComplexError, TilebeamError
from tilebeam.grammars.rules import Kind, Rules, RulesError, read_rules
from tilebeam.native.fork_locks import free_in_children
from tilebeam.native.llama import Vocab, check_tokens
from tilebeam.native.sampling import address_of, ffi, lib

# Grammars that a vocabulary remembers; each may be some MiB.
_MOST_GRAMMARS = 32


class Matcher:
    """Owns where one sequence is in a grammar.

    Attributes:
        pointer: a struct tb_grammar.

    Args:
        grammar: GBNF.
        behind_space: up to two white-space characters may come first.

    Raises:
        TilebeamError: the grammar is invalid.
        GrammarTooComplexError: a text may begin in too many ways.
    """

    def __init__(self, grammar: str, vocab: Vocab, *, behind_space: bool = False) -> None:
        with _known_lock:
            known = _known.get(vocab)
            if known is None:
                known = _known[vocab] = _Grammars(vocab)
        self._kept = known.tables(grammar, vocab, behind_space)  # what the native matcher points to
        self.pointer = lib.tb_grammar_new(self._kept[0], known.pieces)
        if not self.pointer:
            known.forget(grammar, behind_space)
            raise too_complex("The beginning of a text")

    def close(self) -> None:
        """Free what native code holds."""
        if self.pointer is not None:
            lib.tb_grammar_free(self.pointer)
            self.pointer = None


def too_complex(what: str) -> GrammarTooComplexError:
    """Make the exception for a text whose next token takes too many steps."""
    return GrammarTooComplexError(
        f"{what} can be read in too many ways under the grammar. Use fewer alternatives that begin alike, and fewer "
        "parts next to each other that may be empty."
    )


def is_known(grammar: str, vocab: Vocab) -> bool:
    """Return whether a grammar that was asked of this vocabulary lately was fine."""
    with _known_lock:
        known = _known.get(vocab)
    return known is not None and grammar in known


class _Grammars:
    """The grammars that were asked of a vocabulary lately, and its tokens' texts, as native code reads them."""

    def __init__(self, vocab: Vocab) -> None:  # which it must not keep: it lives as long as the vocabulary
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, bool], list[Any]] = OrderedDict()
        self.pieces, self._kept = _pieces(vocab)

    def tables(self, grammar: str, vocab: Vocab, behind_space: bool) -> list[Any]:
        """Return a struct tb_grammar_rules, and what has to live as long.

        Raises:
            TilebeamError: the grammar is invalid.
        """
        key = grammar, behind_space
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        try:
            rules = read_rules(grammar, partial(_token, vocab))
        except RulesError as error:
            raise TilebeamError(f"Invalid grammar: {error}.") from None
        named = [value for kind, value in _elements(rules) if kind in (Kind.TOKEN, Kind.NOT_TOKEN)]
        if named:
            check_tokens(named, vocab.size, "grammar")
        tables = [*_native(rules.behind_space() if behind_space else rules), self._kept]
        with self._lock:
            self._tables[key] = tables
            if len(self._tables) > _MOST_GRAMMARS:
                self._tables.popitem(last=False)
        return tables

    def forget(self, grammar: str, behind_space: bool) -> None:
        """Do not remember a grammar."""
        with self._lock:
            self._tables.pop((grammar, behind_space), None)

    def __contains__(self, grammar: str) -> bool:
        with self._lock:
            return (grammar, False) in self._tables


def _token(vocab: Vocab, name: str) -> int | None:
    tokens = vocab.tokenize(name, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 else None


_known: weakref.WeakKeyDictionary[Vocab, _Grammars] = weakref.WeakKeyDictionary()
_known_lock = free_in_children()


def _elements(rules: Rules) -> Any:
    """Return all elements, each alternative with its end."""
    end = ((Kind.END, 0),)
    return chain.from_iterable((*alternative, *end) for body in rules.bodies for alternative in body)


def _native(rules: Rules) -> list[Any]:
    alternatives = [alternative for body in rules.bodies for alternative in body]
    arrays = {
        "elements": np.array(list(_elements(rules)), np.int32),
        "alternatives": _starts([len(alternative) + 1 for alternative in alternatives]),
        "rules": _starts([len(body) for body in rules.bodies]),
        "ranges": np.array([code for ranges in rules.sets for pair in ranges for code in pair] or [0], np.uint32),
        "sets": _starts([len(ranges) for ranges in rules.sets]),
    }
    types = {"elements": "struct tb_grammar_element[]", "ranges": "uint32_t[]"}
    kept = {name: ffi.from_buffer(types.get(name, "int32_t[]"), array) for name, array in arrays.items()}
    return [ffi.new("struct tb_grammar_rules *", kept), kept]


def _starts(sizes: list[int]) -> Any:
    """Return where each part begins, and where the last one ends."""
    return np.array([0, *accumulate(sizes)], np.int32)


def _pieces(vocab: Vocab) -> tuple[Any, list[Any]]:
    """Return a struct tb_pieces, and what has to live as long."""
    types = "int32_t (*)(const void *, int32_t, char *, int32_t, int32_t, bool)", "bool (*)(const void *, int32_t)"
    to_piece = ffi.cast(types[0], address_of(C._lib.llama_token_to_piece))
    is_end = ffi.cast(types[1], address_of(C._lib.llama_vocab_is_eog))
    pointer = ffi.cast("void *", address_of(vocab.pointer))
    starts, ends = np.empty(vocab.size + 1, np.uint32), np.empty(vocab.size, np.uint8)
    kept = [ffi.from_buffer("uint32_t[]", starts), ffi.from_buffer("uint8_t[]", ends)]
    lib.tb_read_pieces(pointer, vocab.size, to_piece, is_end, ffi.NULL, *kept)
    text = ffi.from_buffer("uint8_t[]", np.empty(max(1, int(starts[-1])), np.uint8))
    lib.tb_read_pieces(pointer, vocab.size, to_piece, is_end, text, *kept)
    struct = ffi.new("struct tb_pieces *", {"n_vocab": vocab.size, "bytes": text, "starts": kept[0], "ends": kept[1]})
    return struct, [struct, text, *kept]
