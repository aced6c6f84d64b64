"""Prompts of texts with a gap, for models that were made to fill it."""

from __future__ import annotations

from collections.abc import Sequence

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab


def gap_prompt(
    vocab: Vocab, before: str | Sequence[int], behind: str, extra: Sequence[tuple[str, str]], room: int
) -> list[int]:
    """Make the prompt that has the model write what stands between two texts; see `LM.infill_prompt`.

    Args:
        room: tokens that the prompt may have.

    Raises:
        TilebeamError: the file names no tokens for the parts.
    """
    if min(vocab.fim) < 0:
        raise TilebeamError("This model cannot fill gaps: its file names no tokens for it.")
    prefix, suffix, middle = vocab.fim
    head = vocab.tokenize(before, False, False) if isinstance(before, str) else [int(t) for t in before]
    bos = [vocab.bos] if vocab.adds_bos and head[:1] != [vocab.bos] else []
    gap = [prefix, *head, suffix, *vocab.tokenize(behind, False, False), middle]
    return [*bos, *_other_files(vocab, extra, room - len(gap) - len(bos)), *gap]


def _other_files(vocab: Vocab, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Return what goes before a text: pieces of other files, the last ones that there is room for.

    Models that know repositories have tokens for them and their files; others read the plain texts.
    """
    if not extra:
        return []
    repository, file = vocab.fim_repository, vocab.fim_file
    first, last = list[int](), list[int]()
    if file >= 0:
        first = [] if repository < 0 else [repository, *vocab.tokenize("project\n", False, False)]
        last = [file, *vocab.tokenize("file\n", False, False)]
    room -= len(first) + len(last)
    kept: list[list[int]] = []
    for name, text in reversed(extra):
        mark = [] if file < 0 else [file]
        ids = [*mark, *vocab.tokenize(f"{name}\n{text}" if mark else f"{text}\n\n", False, False)]
        if len(ids) > room:
            break
        room -= len(ids)
        kept.append(ids)
    return [*first, *(token for ids in reversed(kept) for token in ids), *last] if kept else []
