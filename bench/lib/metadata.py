"""Metadata of a GGUF file that is written from scratch: a transformer's shape, and a SentencePiece vocabulary.

What every architecture of the llama family has in common; the rest its writer adds. The keys are those that llama.cpp
reads (gguf-py's constants.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf

Piece = tuple[str, gguf.TokenType]

UNK, BOS, EOS = 0, 1, 2
# How every SentencePiece vocabulary begins: the special tokens, then all bytes, so that every text has tokens.
FIRST_PIECES: tuple[Piece, ...] = (
    ("<unk>", gguf.TokenType.UNKNOWN),
    ("<s>", gguf.TokenType.CONTROL),
    ("</s>", gguf.TokenType.CONTROL),
    *((f"<0x{b:02X}>", gguf.TokenType.BYTE) for b in range(256)),
)


def add_shape(
    w: gguf.GGUFWriter,
    *,
    n_ctx: int,
    n_embd: int,
    n_layer: int,
    n_ff: int,
    n_head: int,
    n_head_kv: int | Sequence[int],
    head_dim: int,
    rope_base: float,
    rms_eps: float,
    n_vocab: int,
) -> None:
    """Sizes and constants of a transformer with RMS norms and rotary positions over whole heads.

    Args:
        n_head_kv: of all layers, or of each.
    """
    w.add_context_length(n_ctx)
    w.add_embedding_length(n_embd)
    w.add_block_count(n_layer)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_rope_dimension_count(head_dim)
    w.add_rope_freq_base(rope_base)
    w.add_layer_norm_rms_eps(rms_eps)
    w.add_vocab_size(n_vocab)


def add_vocabulary(w: gguf.GGUFWriter, pieces: Sequence[Piece], scores: Sequence[float]) -> None:
    """Add a SentencePiece vocabulary that begins with `FIRST_PIECES`; texts get BOS, but no EOS and no space in front.

    Args:
        scores: of each piece; pairs of pieces merge in the order of what they become, highest first.
    """
    w.add_tokenizer_model("llama")
    w.add_token_list([text for text, _ in pieces])
    w.add_token_scores(list(scores))
    w.add_token_types([int(kind) for _, kind in pieces])
    w.add_unk_token_id(UNK)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(False)
