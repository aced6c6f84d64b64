"""A thin, owning view of llama.cpp's C API: model, context, batch. Knows nothing of scheduling.

Objects free what they own in `close`; a closed object's pointer is None, so that late use fails in Python and not in C.
llama.cpp's log goes through one router: a thread that captures sees its own lines, all others go where they went
before.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.native.batch_order import places
from tilebeam.native.fork_locks import free_in_children

if TYPE_CHECKING:
    from tilebeam.native.layer_tap import LayerTap

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ


class LogRouter:
    """Takes llama.cpp's log callback once and hands lines to the capturing thread, else to the former callback."""

    LEVEL_ERROR = 4
    LEVEL_CONTINUE = 5

    def __init__(self) -> None:
        self._local = threading.local()
        self._former = C.llama_log_callback()
        self._former_data = ctypes.c_void_p()
        C.llama_log_get(ctypes.byref(self._former), ctypes.byref(self._former_data))
        self._callback = C.llama_log_callback(self._line)
        C.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _line(self, level: int, text: bytes, _data: Any) -> None:
        lines: list[tuple[int, str]] | None = getattr(self._local, "lines", None)
        if lines is not None:
            lines.append((level, text.decode("utf-8", "replace")))
        if self._former and (lines is None or self._local.echo):
            self._former(level, text, self._former_data)

    @contextmanager
    def capture(self, echo: bool = False) -> Iterator[list[tuple[int, str]]]:
        """Collect this thread's (level, text) pairs; nested captures see only their own.

        Args:
            echo: lines go to the former callback, too.
        """
        outer = getattr(self._local, "lines", None), getattr(self._local, "echo", False)
        lines: list[tuple[int, str]] = []
        self._local.lines, self._local.echo = lines, echo
        try:
            yield lines
        finally:
            self._local.lines, self._local.echo = outer


_router: LogRouter | None = None
_router_lock = free_in_children()


def log_router() -> LogRouter:
    """Return the process-wide router, installed on first use."""
    global _router
    with _router_lock:
        if _router is None:
            _router = LogRouter()
        return _router


def errors_in(lines: Sequence[tuple[int, str]]) -> str:
    """Join the error lines of a captured log to one string, "" if there are none."""
    kept: list[str] = []
    keep = False
    for level, text in lines:
        keep = keep if level == LogRouter.LEVEL_CONTINUE else level == LogRouter.LEVEL_ERROR
        if keep:
            kept.append(text)
    return " ".join("".join(kept).split())


def check_tokens(tokens: Sequence[int], n_vocab: int, what: str = "") -> None:
    """Raise `TilebeamError` for a token that a vocabulary of `n_vocab` tokens does not have.

    Args:
        what: they are tokens of, for the message.
    """
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= n_vocab:
        named = f"{what}: token" if what else "Token"
        raise TilebeamError(f"{named} {low if low < 0 else high} is not in the vocabulary (0 to {n_vocab - 1}).")


class Vocab:
    """Tokens and text of one model. Lives as long as the model.

    A file without a tokenizer ("no_vocab") has tokens that stand for no text and end nothing; llama.cpp would end the
    process if it were asked.
    """

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.has_text: bool = C.llama_vocab_type(pointer) != C.LLAMA_VOCAB_TYPE_NONE
        self.size: int = C.llama_vocab_n_tokens(pointer)
        self.bos: int = C.llama_vocab_bos(pointer)
        self.eos: int = C.llama_vocab_eos(pointer)
        self.sep: int = C.llama_vocab_sep(pointer)
        self.adds_bos: bool = C.llama_vocab_get_add_bos(pointer)
        self.adds_eos: bool = C.llama_vocab_get_add_eos(pointer)
        self.adds_sep: bool = C.llama_vocab_get_add_sep(pointer)
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return token ids of a text.

        Raises:
            TilebeamError: the model has no tokenizer.
        """
        if not self.has_text:
            raise TilebeamError("This model has no tokenizer (tokenizer.ggml.model is no_vocab): give token ids.")
        raw = text.encode("utf-8", "surrogatepass")
        room = len(raw) + 8
        while True:
            tokens = np.empty(room, np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = C.llama_tokenize(self.pointer, raw, len(raw), pointer, room, add_special, parse_special)
            if n >= 0:
                return [int(t) for t in tokens[:n]]
            if -n <= room:
                raise TilebeamError("The model's tokenizer failed on this text.")
            room = -n

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; control tokens add none."""
        known = self._pieces.get(token) if self.has_text else b""
        if known is None:
            known = self._pieces[token] = self._written(token, special=False)
        return known

    def spelling(self, token: int) -> str:
        """Spell a token, control tokens too, as the text of a template does; "" where there is no token."""
        return self._written(token, special=True).decode("utf-8", "replace") if token >= 0 and self.has_text else ""

    def _written(self, token: int, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n: int = C.llama_token_to_piece(self.pointer, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def entry(self, token: int) -> bytes:
        """Return a token of the vocabulary (0 to size - 1) as the file spells it; b"" without a tokenizer."""
        return bytes(C.llama_vocab_get_text(self.pointer, token) or b"") if self.has_text else b""

    def is_control(self, token: int) -> bool:
        """Tell whether the token is no text: BOS, the marks of chat templates .."""
        return self.has_text and bool(C.llama_vocab_is_control(self.pointer, token))

    def text(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Tell whether the token ends a generation (EOS, end of turn ..)."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = self.has_text and bool(C.llama_vocab_is_eog(self.pointer, token))
        return known

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        is_end = C.llama_vocab_is_eog
        return tuple(t for t in range(self.size) if is_end(self.pointer, t)) if self.has_text else ()


# Architectures that this llama.cpp computes wrongly, and when: PLaMo 2 puts the state of a batch's second sequence into
# another's place; CogVLM gives logits of the first tokens of a batch for those that were asked for; DeepSeek 4's memory
# asserts that sequences are copied whole, and is mixed up when one of them ends.
COMPUTED_WRONGLY = {
    "plamo2": "in batches of several sequences",
    "cogvlm": "in batches where not all tokens have logits",
    "deepseek4": "where sequences fork",
}


class Model:
    """Owns a llama_model."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.vocab = Vocab(C.llama_model_get_vocab(pointer))
        self.n_swa: int = C.llama_model_n_swa(pointer)
        self.n_ctx_train: int = C.llama_model_n_ctx_train(pointer)
        self.n_embd: int = C.llama_model_n_embd(pointer)
        self.n_embd_out: int = C.llama_model_n_embd_out(pointer)  # of an embedding
        self.n_labels: int = C.llama_model_n_cls_out(pointer)  # outputs of its classifier
        self.n_layer: int = C.llama_model_n_layer(pointer)
        self.n_params: int = C.llama_model_n_params(pointer)
        self.n_bytes: int = C.llama_model_size(pointer)
        self.recurrent: bool = C.llama_model_is_recurrent(pointer)  # in all layers
        # State that cannot be cut at a position: only whole sequences can be forked.
        self.whole_forks_only: bool = self.recurrent or C.llama_model_is_hybrid(pointer)
        # Why it does not write one token after the other; "" if it does.
        self.kind_refused = (
            "an encoder model"
            if C.llama_model_has_encoder(pointer) or not C.llama_model_has_decoder(pointer)
            else "a diffusion model"
            if C.llama_model_is_diffusion(pointer)
            else ""
        )

    def description(self) -> str:
        """Return family, size and type in a line, e.g. "qwen2 0.5B Q4_K_M"; the size is the one that the file tells,
        else its parameters."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.pointer, buffer, len(buffer))
        family, _, kind = buffer.value.decode("utf-8", "replace").split(" ", 2)
        kind = re.sub(r" - (?:([SML])\w+|[\d.]+ bpw)$", lambda m: f"_{m[1]}" if m[1] else "", kind)
        C.llama_model_meta_val_str(self.pointer, b"general.size_label", buffer, len(buffer))
        label = buffer.value.decode("utf-8", "replace")
        n = self.n_params
        counted = f"{n / 1e9:.1f}B" if n >= 999_500_000 else f"{n / 1e6:.{0 if n >= 9_950_000 else 1}f}M"
        return f"{family} {label if re.fullmatch(r'[0-9][0-9A-Za-z.x-]{0,15}', label) else counted} {kind}"

    def metadata(self) -> dict[str, str]:
        """Return the file's key-value pairs as llama.cpp prints them (arrays are shortened)."""
        result: dict[str, str] = {}
        for i in range(C.llama_model_meta_count(self.pointer)):
            pair = []
            for read in (C.llama_model_meta_key_by_index, C.llama_model_meta_val_str_by_index):
                room = 512
                buffer = ctypes.create_string_buffer(room)
                n = read(self.pointer, i, buffer, room)
                if n >= room:
                    buffer = ctypes.create_string_buffer(n + 1)
                    read(self.pointer, i, buffer, n + 1)
                pair.append(buffer.value.decode("utf-8", "replace"))
            result[pair[0]] = pair[1]
        return result

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the file's chat template, or another one by its name; None if it has none (a base model)."""
        text = C.llama_model_chat_template(self.pointer, name.encode() if name else None)
        return text.decode("utf-8", "replace") if text else None

    def adapter(self, path: str) -> Adapter | None:
        """Load a LoRA adapter for this model, before its contexts are made; None: llama.cpp's log says why not."""
        pointer = C.llama_adapter_lora_init(self.pointer, os.fsencode(path))
        return Adapter(pointer) if pointer else None

    def close(self) -> None:
        """Free the model. Its contexts and adapters must be closed before."""
        if self.pointer is not None:
            C.llama_model_free(self.pointer)
            self.pointer = None


class Adapter:
    """Owns a llama_adapter_lora."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    def close(self) -> None:
        """Free the adapter. Contexts that it is in force in must be closed before."""
        if self.pointer is not None:
            C.llama_adapter_lora_free(self.pointer)
            self.pointer = None


@cache
def builtin_template_names() -> tuple[str, ...]:
    """Return names of the chat templates that llama.cpp knows by heart."""
    names = (ctypes.c_char_p * C.llama_chat_builtin_templates(None, 0))()
    C.llama_chat_builtin_templates(names, len(names))
    return tuple(sorted(name.decode() for name in names if name))


def apply_builtin_template(template: str, messages: Sequence[tuple[str, str]]) -> str:
    """Format (role, content) pairs with one of the templates that llama.cpp knows by heart, up to where the assistant
    speaks.

    A NUL character ends a text in C, and models do say it: there, a mark that no text holds stands for it.

    Args:
        template: its name.

    Raises:
        TilebeamError: it is none of them.
    """
    chat = (C.llama_chat_message * len(messages))()
    nul = f"NUL{secrets.token_hex(12)}".encode()
    for item, (role, content) in zip(chat, messages, strict=True):
        item.role = role.encode("utf-8").replace(b"\0", nul)
        item.content = content.encode("utf-8").replace(b"\0", nul)
    room = 256 + 2 * sum(len(item.content) + 64 for item in chat)
    while True:
        buffer = ctypes.create_string_buffer(room)
        n = C.llama_chat_apply_template(template.encode("utf-8"), chat, len(messages), True, buffer, room)
        if n < 0:
            raise TilebeamError(f"llama.cpp does not know the chat template {template[:80]!r}.")
        if n <= room:
            return buffer.raw[:n].replace(nul, b"\0").decode("utf-8", "replace")
        room = n


# Of a batch: a sequence, the position of its first token here, the tokens, and how many of them, the last, give logits.
BatchPiece = tuple[int, int, list[int], int]


class Follower(Protocol):
    """What is told of all that happens to a context's sequences."""

    def decoded(self, n: int) -> None:
        """Note that the first n entries of the batch arrays were decoded; the context's `taps` have their rows."""

    def forked(self, source: int, target: int, length: int) -> None:
        """Note that a sequence shares the first `length` tokens of another now."""

    def truncated(self, seq: int, length: int) -> None:
        """Note that a sequence has only its first `length` tokens any more."""

    def cleared(self) -> None:
        """Note that there are no sequences any more."""


class Context:
    """Owns a llama_context and the arrays of one batch.

    The batch arrays are numpy views of the memory that llama_decode reads: ``token``, ``pos``, ``seq`` (one sequence
    per token) and ``output`` (1: keep the logits). Fill the first n entries (`fill` does), then call ``decode(n)``.

    ``batch``: the same arrays, as llama.cpp sees them.
    ``tap``: takes hidden states behind a layer; None: there are those behind the final norm only.
    ``on_decode``, if set, is called after every decode with its begin and end, as of `time.monotonic_ns`.
    ``follower``, if set, is told of all that happens to the sequences.
    """

    def __init__(self, pointer: Any, model: Model, n_batch: int, max_outputs: int, tap: LayerTap | None = None) -> None:
        self.pointer = pointer
        self.taps = tap
        self.tap = tap if tap is not None and tap.states else None
        self.model = model
        self.follower: Follower | None = None
        self.max_outputs = max_outputs  # entries of one batch that may have logits
        self.n_ctx: int = C.llama_n_ctx(pointer)
        self.n_ubatch: int = C.llama_n_ubatch(pointer)  # tokens of one graph; a larger batch is decoded in parts
        self.n_seq_max: int = C.llama_n_seq_max(pointer)
        self.n_batch = n_batch
        self.on_decode: Callable[[int, int], None] | None = None
        self._all_hidden = False  # see `output_hidden`
        self._memory = C.llama_get_memory(pointer)
        self.token: I32 = np.zeros(n_batch, np.int32)
        self.pos: I32 = np.zeros(n_batch, np.int32)
        self.seq: I32 = np.zeros(n_batch, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(n_batch, np.int8)
        self._n_seq_id: I32 = np.ones(n_batch, np.int32)
        self._seq_pointers = (self.seq.ctypes.data + 4 * np.arange(n_batch)).astype(np.uintp)
        self.batch = C.llama_batch()
        i32 = ctypes.POINTER(ctypes.c_int32)
        self.batch.token = self.token.ctypes.data_as(i32)
        self.batch.pos = self.pos.ctypes.data_as(i32)
        self.batch.n_seq_id = self._n_seq_id.ctypes.data_as(i32)
        self.batch.seq_id = self._seq_pointers.ctypes.data_as(ctypes.POINTER(i32))
        self.batch.logits = self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def adapt(self, adapters: Sequence[tuple[Adapter, float]]) -> bool:
        """Put LoRA adapters in force with these scales; whether llama.cpp takes them."""
        chosen = [(adapter.pointer, scale) for adapter, scale in adapters if scale]
        pointers = (C.llama_adapter_lora_p_ctypes * len(chosen))(*(pointer for pointer, _ in chosen))
        values = (ctypes.c_float * len(chosen))(*(scale for _, scale in chosen))
        return int(C.llama_set_adapters_lora(self.pointer, pointers, len(chosen), values)) == 0

    def fill(self, pieces: Sequence[BatchPiece]) -> None:
        """Fill the batch arrays from their beginning with pieces of texts, one behind the other."""
        tokens: list[int] = []
        pos: list[int] = []
        seq: list[int] = []
        output: list[int] = []
        for id, start, text, outputs in pieces:
            tokens += text
            pos += range(start, start + len(text))
            seq += [id] * len(text)
            output += [0] * (len(text) - outputs) + [1] * outputs
        n = len(tokens)
        self.token[:n], self.pos[:n], self.seq[:n], self.output[:n] = tokens, pos, seq, output

    def decode(self, n: int) -> int:
        """Decode the first n entries of the batch arrays; llama_decode's own return code."""
        self.batch.n_tokens = n
        taps, following = self.taps, self.follower is not None
        if taps is not None and following:
            taps.start(n)
        on_decode = self.on_decode
        begin = 0 if on_decode is None else time.monotonic_ns()
        code = int(C.llama_decode(self.pointer, self.batch))
        if on_decode is not None:
            on_decode(begin, time.monotonic_ns())
        if taps is not None and taps.on:
            if self.model.whole_forks_only:
                taps.arrange(self._places(n))
            if following:
                taps.stop()
        if self.follower is not None and code == 0:
            self.follower.decoded(n)
        return code

    def _places(self, n: int) -> npt.NDArray[np.int64]:
        seq = self.seq[:n].tolist()
        return places(seq, self.n_ubatch, rising=self.model.recurrent, alone=self._all_hidden)

    def try_taps(self) -> tuple[int, str]:
        """Decode two texts that begin alike, and see whether `taps` has like rows for their first tokens, which
        llama.cpp may compute elsewhere than where they are in the batch. Return llama_decode's code, and why taps are
        of no use with this model; "": they are."""
        assert self.taps is not None
        texts = [(1, 0, [0, 1], 1), (0, 0, [0], 1)] if self.n_batch > 2 else [(0, 0, [0], 1)]
        self.fill(texts)
        n = sum(len(tokens) for _, _, tokens, _ in texts)
        with self.taps.copying(n):
            code = self.decode(n)
        self.clear()
        rows = self.taps.rows(self.taps.layers)
        if rows is None:
            return code, f"llama.cpp gives no outputs of the model's layers {self.taps.layers}"
        if n > 1 and np.abs(rows[0] - rows[2]).sum() > np.abs(rows[0] - rows[1]).sum():
            return code, "llama.cpp computes the tokens of a batch in an order that is not known"
        return code, ""

    def logits(self, i: int) -> F32:
        """Return a view (no copy) of the logits of batch entry i, shape [n_vocab]; valid until the next decode."""
        return _row(C.llama_get_logits_ith(self.pointer, i), self.model.vocab.size, f"logits for entry {i}")

    def output_hidden(self, on: bool) -> None:
        """Have the next batches give hidden states too, or no longer. llama.cpp then wants `output` set for every
        entry."""
        self._all_hidden = on
        C.llama_set_embeddings(self.pointer, on)

    def hidden(self, i: int) -> F32:
        """Return a view of the hidden state of batch entry i behind the final norm, shape [n_embd]; valid until the
        next decode, and only after a batch with `output_hidden`."""
        return _row(C.llama_get_embeddings_ith(self.pointer, i), self.model.n_embd, f"hidden state for entry {i}")

    def pooled(self, seq: int, width: int) -> F32:
        """Copy what a pooling context made of a sequence of the last batch, shape [width]."""
        return _row(C.llama_get_embeddings_seq(self.pointer, seq), width, f"embedding of sequence {seq}").copy()

    def embedding(self, i: int) -> F32:
        """Return the embedding of batch entry i, as `hidden` does, in a context that always gives them, shape
        [n_embd_out]."""
        return _row(C.llama_get_embeddings_ith(self.pointer, i), self.model.n_embd_out, f"embedding of entry {i}")

    def fork(self, source: int, target: int, length: int) -> None:
        """Let sequence `target` share the first `length` cells of `source`. Metadata only, nothing is copied."""
        C.llama_memory_seq_cp(self._memory, source, target, 0, length)
        if self.follower is not None:
            self.follower.forked(source, target, length)

    def drop(self, seq: int) -> None:
        """Remove a sequence from its cells."""
        C.llama_memory_seq_rm(self._memory, seq, -1, -1)
        if self.follower is not None:
            self.follower.truncated(seq, 0)

    def truncate(self, seq: int, length: int) -> bool:
        """Remove a sequence from its cells behind the first `length` positions. False: the model's memory cannot be cut
        there (recurrent layers), and nothing was removed."""
        done = bool(C.llama_memory_seq_rm(self._memory, seq, length, -1))
        if self.follower is not None and done:
            self.follower.truncated(seq, length)
        return done

    def first(self, seq: int) -> int:
        """Return the position of the first token of a sequence that is still there in all layers' caches: of a sliding
        window, others may have taken those before it. -1: there is none."""
        return int(C.llama_memory_seq_pos_min(self._memory, seq))

    def sequence_bytes(self, seq: int, *, partial: bool = False) -> int:
        """Return the size of what `save_sequence` returns; 0: llama.cpp cannot save it."""
        return int(C.llama_state_seq_get_size_ext(self.pointer, seq, _flags(partial)))

    def save_sequence(
        self, seq: int, *, partial: bool = False, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """Return the cells of a sequence as llama.cpp writes them.

        Args:
            into: is used again for them if it has their size.
            partial: only what cannot be cut at an earlier token: recurrent states, sliding windows.

        Raises:
            TilebeamError: it cannot write them.
        """
        size = self.sequence_bytes(seq, partial=partial)
        data = into if into is not None and len(into) == size else np.empty(size, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not size or C.llama_state_seq_get_data_ext(self.pointer, pointer, size, seq, _flags(partial)) != size:
            raise TilebeamError("llama.cpp cannot save this model's KV cells.")
        return data

    def load_sequence(self, seq: int, cells: npt.NDArray[np.uint8], *, partial: bool = False) -> bool:
        """Give a sequence the cells that `save_sequence` returned, in place of its own; whether llama.cpp takes them.
        If not, the sequence is to be dropped."""
        pointer = np.ascontiguousarray(cells).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        taken = C.llama_state_seq_set_data_ext(self.pointer, pointer, len(cells), seq, _flags(partial))
        return int(taken) == len(cells)

    def clear(self) -> None:
        """Forget all sequences."""
        C.llama_memory_clear(self._memory, False)
        if self.follower is not None:
            self.follower.cleared()

    def close(self) -> None:
        """Free the context."""
        if self.pointer is not None:
            with log_router().capture():  # it tells of its buffers
                C.llama_free(self.pointer)
            self.pointer = None


def _row(pointer: Any, width: int, what: str) -> F32:
    if not pointer:
        raise TilebeamError(f"llama.cpp has no {what} of the last batch.")
    return np.ctypeslib.as_array(pointer, (width,))


def _flags(partial: bool) -> int:
    return int(C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE)
