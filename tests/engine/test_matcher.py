"""The native matcher of grammars against llama.cpp's, which follows every way by itself, and with grammars that have
too many ways for that."""

from __future__ import annotations

import ctypes
import gc
import math
import random
import weakref
from collections.abc import Iterator
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import pytest
import tilebeam
from grammars_kit import GOOD, HOSTILE_AT_ONCE, HOSTILE_SOON
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.engine.matcher import Matcher
from tilebeam.errors import GrammarTooComplexError
from tilebeam.grammars.constraint import of_regex, of_schema
from tilebeam.native.llama import Vocab
from tilebeam.native.sampling import ffi, lib

from bench.lib.synth import preset, write_model

# Grammars that llama.cpp's matcher does not get through.
SLOW = ("optional", "optional rules", "alike", "chain", "words", "many", "copies")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    path = write_model(
        tmp_path_factory.mktemp("models") / "f32.gguf", preset("tiny", arch="llama", type="f32", n_layer=1)
    )
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def vocab(lm: LM) -> Vocab:
    return lm.engine.vocab


class Native:
    """The matcher that is tested."""

    def __init__(self, grammar: str, vocab: Vocab, *, behind_space: bool = False) -> None:
        self._matcher = Matcher(grammar, vocab, behind_space=behind_space)
        self._candidates = np.zeros(vocab.size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._candidates["id"] = np.arange(vocab.size)

    def allowed(self) -> set[int] | None:
        """Tokens that may come next, None: too many steps."""
        self._candidates["logit"] = 1
        data = ffi.from_buffer("struct tb_candidate[]", self._candidates)
        if not lib.tb_grammar_apply(self._matcher.pointer, data, len(self._candidates)):
            return None
        return set(np.flatnonzero(self._candidates["logit"] == 1).tolist())

    def accept(self, token: int) -> bool:
        return bool(lib.tb_grammar_accept(self._matcher.pointer, token))


class Reference:
    """llama.cpp's."""

    def __init__(self, grammar: str, vocab: Vocab) -> None:
        self._vocab = vocab
        self._sampler = C.llama_sampler_init_grammar(vocab.pointer, grammar.encode(), b"root")
        assert self._sampler

    def allowed(self) -> set[int]:
        n = self._vocab.size
        data = (C.llama_token_data * n)(*[C.llama_token_data(t, 1.0, 0.0) for t in range(n)])
        array = C.llama_token_data_array(data, n, -1, False)
        C.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {data[t].id for t in range(n) if data[t].logit != -math.inf}

    def accept(self, token: int) -> None:
        C.llama_sampler_accept(self._sampler, token)


def spelled(vocab: Vocab, tokens: set[int]) -> set[int]:
    """Ends, and tokens of whole characters: llama.cpp takes control tokens for their names, and lets bytes through that
    begin no character, but not all of those that may begin one of a negated class."""
    return {t for t in tokens if vocab.is_end(t) or (not vocab.is_control(t) and whole(vocab.piece(t)))}


def whole(piece: bytes) -> bool:
    return bool(piece) and "\ufffd" not in piece.decode("utf-8", "replace")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 300},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "réd", "greener"]}, "maxItems": 50},
        "mark": {"type": "number", "minimum": -12.5, "maximum": 1000},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["tags"],
    "$defs": {"inner": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/inner"}}]}},
}
COMPARED = {name: text for name, text in GOOD.items() if name not in SLOW} | {
    "schema": of_schema(SCHEMA),
    "regex": of_regex(r"(\w+@\w+\.(com|org)|[+]?\d{2,4}(-\d+){0,3}|é+€?)( |\n)?"),
    "bytes": "root ::= [à-ü€\\U0001F600-\\U0001F64F]+ [^a-zà-ü]*",
    "redefined": 'root ::= "x"\nroot ::= any*\nany ::= . "." | [^.]',
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_same_tokens_as_llama_cpp(vocab: Vocab, name: str) -> None:
    """Along random texts; tokens of the text are taken at random, now and then the shortest or one of bytes."""
    for seed in range(3):
        rng = random.Random(seed)
        mine, theirs = Native(COMPARED[name], vocab), Reference(COMPARED[name], vocab)
        for _ in range(25):
            allowed = mine.allowed()
            assert allowed is not None
            assert spelled(vocab, allowed) == spelled(vocab, theirs.allowed())
            going = sorted(t for t in allowed if not vocab.is_end(t) and whole(vocab.piece(t)))
            if not going:
                break
            token = rng.choice(going)
            assert mine.accept(token)
            theirs.accept(token)


def test_characters_that_tokens_cut(vocab: Vocab) -> None:
    """Tokens of single bytes: the first ones are let through only where the character may be one of the grammar's."""
    by_bytes = {vocab.piece(t): t for t in range(vocab.size) if len(vocab.piece(t)) == 1 and vocab.piece(t)[0] >= 0x80}
    if len(by_bytes) < 64:
        pytest.skip("the vocabulary has no tokens of single bytes")
    for char in "äü€😀":
        grammar = Native("root ::= [äü€😀]", vocab)
        for byte in char.encode():
            allowed = grammar.allowed()
            assert allowed is not None
            assert by_bytes[bytes([byte])] in allowed
            assert by_bytes[b"\xc5"] not in allowed
            assert not any(vocab.is_end(t) for t in allowed)
            assert grammar.accept(by_bytes[bytes([byte])])
        assert all(vocab.is_end(t) for t in grammar.allowed() or ())


@pytest.mark.parametrize("name", GOOD)
def test_good_grammars_go_on(vocab: Vocab, name: str) -> None:
    """Whole vocabularies are looked through for every token of long texts, large repetitions and all."""
    rng = random.Random(5)
    grammar = Native(GOOD[name], vocab)
    for _ in range(150):
        allowed = grammar.allowed()
        assert allowed is not None
        going = [t for t in sorted(allowed) if not vocab.is_end(t)]
        if not going:
            break
        assert grammar.accept(rng.choice(going))


def test_what_is_skipped_stays_skipped(vocab: Vocab) -> None:
    """Many parts that may be empty: a text takes them in their order."""
    grammar = Native('root ::= "a"? "b"? "a"? "b"? "c"', vocab)
    letter = {vocab.piece(t): t for t in range(vocab.size) if len(vocab.piece(t)) == 1}
    for char in b"aab":
        assert grammar.accept(letter[bytes([char])])
    allowed = grammar.allowed()
    assert allowed is not None
    assert {vocab.piece(t) for t in allowed} == {b"c"}
    assert not grammar.accept(letter[b"a"])


@pytest.mark.parametrize("name", HOSTILE_AT_ONCE)
def test_grammars_with_too_many_beginnings_are_refused(lm: LM, name: str) -> None:
    with pytest.raises(GrammarTooComplexError, match="The beginning of a text can be read in too many ways"):
        lm.generate("so", SamplingParams(grammar=HOSTILE_AT_ONCE[name]))


@pytest.mark.parametrize("name", HOSTILE_SOON)
def test_grammars_with_ever_more_ways_end_their_own_request_only(lm: LM, name: str) -> None:
    stream = lm.stream("so", SamplingParams(max_tokens=60, seed=2, ignore_eos=True))
    next(stream)
    with pytest.raises(GrammarTooComplexError, match=r"Sample \d: after \d+ tokens the text can be read in too many"):
        lm.generate("one", SamplingParams(n=2, grammar=HOSTILE_SOON[name], max_tokens=900, seed=1))
    assert len(list(stream)) > 10
    assert stream.output.outputs[0].finish_reason == "length"
    assert lm.figures().cells_used == 0


def test_a_stack_that_grows_is_no_harm(vocab: Vocab) -> None:
    """Deep recursion, and as many ends to choose from: nodes that are in no stack any more are forgotten."""
    grammar = Native('root ::= "a" root "b"? | "a" "c"', vocab)
    letter = {vocab.piece(t): t for t in range(vocab.size) if len(vocab.piece(t)) == 1}
    for _ in range(300):
        assert grammar.accept(letter[b"a"])
    assert grammar.accept(letter[b"c"])
    for _ in range(299):
        assert grammar.accept(letter[b"b"])
    allowed = grammar.allowed()
    assert allowed is not None
    assert all(vocab.is_end(t) for t in allowed)


def test_tokens_by_name_and_number(lm: LM, vocab: Vocab) -> None:
    word = next(t for t in range(vocab.size) if len(vocab.piece(t)) > 2 and not vocab.is_end(t))
    grammar = Native(f'root ::= <[{word}]> !<[{word}]> "a"', vocab)
    assert grammar.allowed() == {word}
    assert grammar.accept(word)
    allowed = grammar.allowed()
    assert allowed is not None
    assert len(allowed) > 10
    assert word not in allowed
    with pytest.raises(TilebeamError, match="not in the vocabulary"):
        lm.generate("so", SamplingParams(grammar="root ::= <[99999999]>"))
    with pytest.raises(TilebeamError, match="is not one token"):
        lm.generate("so", SamplingParams(grammar="root ::= <no such token of any model>"))


def test_as_itself_a_token_may_end_within_a_character(vocab: Vocab) -> None:
    begun = next(t for t in range(vocab.size) if vocab.piece(t) == b"\xe2")
    end = next(t for t in range(vocab.size) if len(vocab.piece(t)) > 2 and not vocab.is_end(t))
    grammar = Native(f"root ::= (!<[{end}]>)* <[{end}]>", vocab)
    before = grammar.allowed()
    assert before is not None
    assert {begun, end} <= before
    assert grammar.accept(begun)
    assert grammar.allowed() == before
    assert grammar.accept(begun)
    assert grammar.accept(end)
    allowed = grammar.allowed()
    assert allowed is not None
    assert all(vocab.is_end(t) for t in allowed)


def test_alternatives_that_are_alike_cost_steps(vocab: Vocab) -> None:
    alike = 'root ::= (r "a")?{20000}\nr ::= ' + "|" * 20000
    with pytest.raises(GrammarTooComplexError):
        Matcher(alike, vocab)
    assert Native('root ::= (r "a")?{20}\nr ::= ' + "|" * 20, vocab).allowed()


def test_a_vocabulary_is_forgotten_with_its_model(lm: LM) -> None:
    path = lm.info.path
    with tilebeam.load(path, "cpu", n_ctx=64, threads=1) as other:
        other.generate("a", max_tokens=2, grammar='root ::= "b"+')
        seen = weakref.ref(other.engine.vocab)
    del other
    gc.collect()
    assert seen() is None


def test_white_space_may_come_before_a_grammar_that_refers_to_its_root(vocab: Vocab) -> None:
    ours = Native('root ::= "(" root? ")"', vocab, behind_space=True)
    reference = Reference('root ::= [ \\t\\r\\n]{0,2} own\nown ::= "(" own? ")"', vocab)
    for piece in (b"\n", b" ", b"(", b"(", b")", b")"):
        assert spelled(vocab, ours.allowed() or set()) == spelled(vocab, reference.allowed())
        token = next(t for t in range(vocab.size) if vocab.piece(t) == piece)
        assert ours.accept(token)
        reference.accept(token)
    assert spelled(vocab, ours.allowed() or set()) == spelled(vocab, reference.allowed())
