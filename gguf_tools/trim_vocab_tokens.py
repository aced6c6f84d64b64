"""The tokens that a trimmed vocabulary needs so that it cuts text as the whole one does.

SentencePiece and byte-pair tokenizers merge neighbouring pieces of text, the best pair first. The merges that make a
token are the same in any text that has it: a merge across its border would have swallowed the token. So a vocabulary
that keeps, with every token, the pieces on its way (and their merges) does the same merges on every text whose tokens
it has: what it lost can only remove rivals that were not taken. Text with other tokens falls apart into kept pieces,
down to bytes, and every byte is kept.

Rules of the tokenizers: llama.cpp's src/llama-vocab.cpp (llm_tokenizer_spm_session, llm_tokenizer_bpe_session).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .errors import GGUFError
from .gguf_file import ARRAY, STRING, KeyValue
from .split import Source

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = {"llama": "SentencePiece", "gpt2": "byte-pair encoding"}
# Pre-tokenizers of "gpt2" vocabularies that work on raw UTF-8, not on bytes written as characters.
RAW_PRE = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
# Token ids that llama.cpp takes for begin, end and unknown where the file does not say: these ids must not move.
DEFAULT_IDS = {"llama": 3, "gpt2": 12}
# Bytes that occur in UTF-8.
TEXT_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]
SPACE = "\u2581"  # how SentencePiece writes a space: written in bytes, it would come back as itself
# llama.cpp finds the ends of turns and the like by their text, whatever their type says.
LOOKS_SPECIAL = re.compile(r"_?<[^\s<>].{0,60}>|\[[A-Z_]+\]|\[e~\[")


def _bytes_as_characters() -> list[str]:
    """Return GPT-2's printable character for each byte: itself where it prints, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    out, extra = [], 0x100
    for byte in range(256):
        out.append(chr(byte if byte in printable else extra))
        extra += byte not in printable
    return out


BYTE_CHARACTERS = _bytes_as_characters()


def array_parts(kv: KeyValue) -> tuple[int, int, int]:
    """Return (element type, length, where the first element begins in ``raw``) of an array's record."""
    kind, count = struct.unpack_from("<IQ", kv.raw, kv.body)
    return kind, count, kv.body + 12


def strings(kv: KeyValue) -> list[bytes]:
    """Return the elements of an array of strings, as stored."""
    _, count, at = array_parts(kv)
    out = []
    for _ in range(count):
        n = int.from_bytes(kv.raw[at : at + 8], "little")
        out.append(kv.raw[at + 8 : at + 8 + n])
        at += 8 + n
    return out


def _list(f: Source, name: str, kinds: tuple[int, ...]) -> KeyValue | None:
    kv = f.kv.get(PREFIX + name)
    if kv is not None and (kv.type != ARRAY or array_parts(kv)[0] not in kinds):
        raise GGUFError(f"{f.path}: {PREFIX}{name} is not a list of the right type")
    return kv


def _text(raw: bytes) -> str:
    """Cut a string at the first NUL, as llama.cpp reads it."""
    return raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")


@dataclass
class Vocabulary:
    """The tokenizer of a model file. ``merges`` in order of rank, () for SentencePiece."""

    kind: str
    tokens: list[str]
    scores: list[float]
    types: list[int]
    merges: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def ids(self) -> dict[str, int]:
        """From a token's text to its id; of equal texts the last."""
        return {text: i for i, text in enumerate(self.tokens)}

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        """From a merge to its rank, 0 first; of equal merges the first."""
        out: dict[tuple[str, str], int] = {}
        for i, pair in enumerate(self.merges):
            out.setdefault(pair, i)
        return out

    def path(self, token: int) -> list[tuple[str, str]] | None:
        """Return the merges that make a token of its characters, in order; None if they make something else of them."""
        pieces, done = list(self.tokens[token]), []
        while len(pieces) > 1:
            best, where = None, -1
            for i in range(len(pieces) - 1):
                value = self._priority(pieces[i], pieces[i + 1])
                if value is not None and (best is None or value > best):
                    best, where = value, i
            if best is None:
                return None
            done.append((pieces[where], pieces[where + 1]))
            pieces[where : where + 2] = [pieces[where] + pieces[where + 1]]
        return done

    def _priority(self, left: str, right: str) -> float | None:
        if self.kind == "llama":
            found = self.ids.get(left + right)
            return None if found is None else self.scores[found]
        rank = self.ranks.get((left, right))
        return None if rank is None else -float(rank)

    def byte_tokens(self) -> list[int | None]:
        """Find the token of each byte that occurs in text, None where there is none."""
        if self.kind == "gpt2":
            return [self.ids.get(BYTE_CHARACTERS[b]) for b in TEXT_BYTES]
        return [self.ids.get(f"<0x{b:02X}>") for b in TEXT_BYTES]

    def essential(self, drop_unused: bool) -> Iterator[int]:
        """Return tokens to keep whatever the corpus says: special ones, bytes, and the ids that llama.cpp takes by
        number.

        With ``drop_unused``, control tokens that call themselves unused (llama.cpp's own rule) are not among them.
        """
        yield from range(min(DEFAULT_IDS[self.kind], len(self.tokens)))
        yield from (i for i in self.byte_tokens() if i is not None)
        if self.kind == "llama":
            yield self.ids[SPACE]
        for i, (text, type) in enumerate(zip(self.tokens, self.types, strict=True)):
            if drop_unused and type == CONTROL and "unused" in text:
                continue
            if type not in (NORMAL, UNUSED) or LOOKS_SPECIAL.fullmatch(text):
                yield i


def read_vocabulary(f: Source) -> Vocabulary:
    """Read the vocabulary of a model that can be trimmed.

    Raises:
        GGUFError: the tokenizer is of another kind, has no byte tokens, or its lists do not belong together.
    """
    model = f.kv.get(PREFIX + "model")
    kind = "none" if model is None else str(model.value)
    if kind not in KINDS:
        raise GGUFError(
            f"{f.path} has a {kind!r} tokenizer; only {' and '.join(f'{v} ({k!r})' for k, v in KINDS.items())} "
            "vocabularies can be trimmed"
        )
    pre = f.kv.get(PREFIX + "pre")
    if kind == "gpt2" and pre is not None and pre.value in RAW_PRE:
        raise GGUFError(f"{f.path} has the pre-tokenizer {pre.value!r}, which does not work on bytes: not supported")
    tokens = _list(f, "tokens", (STRING,))
    if tokens is None:
        raise GGUFError(f"{f.path} has no vocabulary")
    texts = [_text(t) or f"[EMPTY_{i}]" for i, t in enumerate(strings(tokens))]  # llama.cpp's own name
    scores, types, merges = _list(f, "scores", (5, 6)), _list(f, "token_type", (5,)), _list(f, "merges", (STRING,))
    vocabulary = Vocabulary(
        kind,
        texts,
        [0.0] * len(texts) if scores is None else scores.value,
        [NORMAL] * len(texts) if types is None else types.value,
    )
    if len(vocabulary.scores) != len(texts) or len(vocabulary.types) != len(texts):
        raise GGUFError(f"{f.path}: its lists of tokens, scores and token types have different lengths")
    if len(vocabulary.ids) != len(texts):
        raise GGUFError(f"{f.path}: the vocabulary has a token twice")
    if kind == "gpt2":
        if merges is None:
            raise GGUFError(f"{f.path} has no merges, which a byte-pair tokenizer needs")
        vocabulary.merges = [split_merge(m) for m in strings(merges)]
    if kind == "llama" and SPACE not in vocabulary.ids:
        raise GGUFError(f"{f.path} has no token for a space: text with dropped tokens would not come back")
    lost = [b for b, i in zip(TEXT_BYTES, vocabulary.byte_tokens(), strict=True) if i is None]
    if kind == "gpt2" and lost:  # bytes that no token has are lost by the source's tokenizer, too
        characters = set().union(*(set(t) for t, type in zip(texts, vocabulary.types, strict=True) if type == NORMAL))
        lost = [b for b in lost if BYTE_CHARACTERS[b] in characters]
    if lost:
        raise GGUFError(
            f"{f.path} has no token for byte 0x{lost[0]:02X} (and {len(lost) - 1} more): dropped tokens could not be "
            "written in bytes"
        )
    return vocabulary


def split_merge(raw: bytes) -> tuple[str, str]:
    """Split a merge into its two pieces; the first may begin with a space, as llama.cpp reads it."""
    text = _text(raw)
    at = text.find(" ", 1)
    return ("", "") if at < 0 else (text[:at], text[at + 1 :])


@dataclass(frozen=True)
class Kept:
    """Tokens of a trimmed vocabulary, ascending, and the merges it keeps (indices into the old list, ascending)."""

    tokens: list[int]
    merges: list[int]
    intermediate: int  # kept only because others are made of them
    filled: int  # kept only to reach a multiple

    def mask(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return bool [n]: which of the n tokens of the old vocabulary are kept."""
        out = np.zeros(n, bool)
        out[self.tokens] = True
        return out


def close(v: Vocabulary, wanted: Iterable[int], multiple: int) -> Kept:
    """Add to the wanted tokens all that they are made of, and fill up to a multiple with the first that need no more.

    A token that merging does not make, or only by way of a piece that is no token, is kept by itself.
    """
    kept: set[int] = set()
    pairs: set[tuple[str, str]] = set()
    start = set(wanted)
    for token in sorted(start):
        kept.add(token)
        steps = _steps(v, token)
        if steps is not None:
            pairs.update(steps)
            kept.update(v.ids[a + b] for a, b in steps)
    intermediate, filled = len(kept) - len(start), 0
    if len(kept) % multiple:
        for token in range(len(v.tokens)):
            if token in kept:
                continue
            steps = _steps(v, token)
            if steps is not None and all(v.ids[a + b] in kept for a, b in steps[:-1]):
                kept.add(token)
                pairs.update(steps)
                filled += 1
                if len(kept) % multiple == 0:
                    break
    merges = sorted(v.ranks[pair] for pair in pairs) if v.kind == "gpt2" else []
    return Kept(sorted(kept), merges, intermediate, filled)


def _steps(v: Vocabulary, token: int) -> list[tuple[str, str]] | None:
    """Return :meth:`Vocabulary.path` where every piece on the way is a token; else None."""
    steps = v.path(token)
    if steps is None or any(a + b not in v.ids for a, b in steps):
        return None
    return steps


def keep_list(v: Vocabulary, lines: Iterable[str], source: str) -> Iterator[int]:
    """Return ids of tokens given by their text, a line each, spaces as in text or as the vocabulary writes them.

    Raises:
        GGUFError: a line is no token.
    """
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text:
            continue
        spelled = text.replace(" ", SPACE) if v.kind == "llama" else _byte_characters(text)
        found = v.ids.get(text, v.ids.get(spelled))
        if found is None:
            raise GGUFError(f"{source}, line {number}: {text!r} is not a token of this vocabulary")
        yield found


def _byte_characters(text: str) -> str:
    return "".join(BYTE_CHARACTERS[b] for b in text.encode("utf-8", "surrogateescape"))
