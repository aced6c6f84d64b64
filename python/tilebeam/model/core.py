"""The core of a loaded model, which its parts share: its context, its engine, its vocabulary, and what it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Never

from tilebeam.chat.chat_prompt import filled_prompt, prompt_of
from tilebeam.chat.chat_template import ChatTemplates
from tilebeam.chat.tools import Tool, tools_of
from tilebeam.engine.dispatcher import Dispatcher
from tilebeam.engine.engine import Engine
from tilebeam.engine.reading import Reader
from tilebeam.engine.turns import Turns
from tilebeam.errors import TilebeamError
from tilebeam.gguf import MatrixGroup, device_share
from tilebeam.gguf.closing import Closing
from tilebeam.model.load_options import Backend
from tilebeam.native.llama import Context, Model, errors_in, log_router
from tilebeam.outputs import EngineFigures
from tilebeam.prompt import Prompt, PromptLike, refuse_messages


@dataclass(frozen=True)
class LoadInfo:
    """Facts of a loaded model.

    Attributes:
        path: the file.
        device: "npu" or "cpu".
        choice: why it is that.
        repacked: whether the file holds tiles.
        tiled_tensors: tensors that the device holds as tiles.
        n_ctx, n_batch, n_ubatch, n_seq_max, threads: as in force.
        executor: "thread" or "process", None on the CPU.
        layers: layers on each device, HMX0 first; the output counts as a layer. Empty on the CPU.
        lora: LoRA adapters in force: files and scales.
        matrices: the weight matrices by type and place, the most bytes first.
        architecture: llama.cpp's name of the model's family.
        generates: whether the model writes texts; of embedding models only `LM.embed` or `LM.rerank` can be asked.
        pooling: how the file says that a text's hidden states become one: "mean", "cls", "last", or "rank" for a model
            that ranks; None: it does not say.
        hidden_layer: samples' hidden states are those behind this layer, None: behind the final norm.
        deterministic: results do not depend on what else is computed beside them.
        kernels: the device's kernel set, such as "avx2"; "" on the CPU.
        cache_ram: bytes for states of texts at earlier tokens.
        window: tokens of the sliding window of some layers, 0 if there is none in so short a context.
        window_cells: KV cells that these layers have; n_ctx: as many as others.
    """

    path: str
    device: Backend
    repacked: bool
    tiled_tensors: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    threads: int
    executor: str | None
    layers: tuple[int, ...] = ()
    lora: tuple[tuple[str, float], ...] = ()
    matrices: tuple[MatrixGroup, ...] = ()
    architecture: str = ""
    generates: bool = True
    pooling: str | None = None
    hidden_layer: int | None = None
    deterministic: bool = False
    kernels: str = ""
    cache_ram: int = 0
    window: int = 0
    window_cells: int = 0
    choice: str = ""

    @property
    def device_share(self) -> float:
        """The part of the weight matrices' bytes that the device multiplies by: 1 for all, 0 on the CPU."""
        return device_share(self.matrices)


class Core(Closing):
    """A model with one context and an engine over it; see `LM`."""

    def __init__(
        self,
        model: Model,
        context: Context,
        info: LoadInfo,
        on_failure: Callable[[int, str], TilebeamError],
        resources: ExitStack,
    ) -> None:
        self.info = info
        self._model = model
        self._context = context
        self._resources = resources
        self._failure = on_failure
        self._engine = Engine(context, info.n_seq_max, context.n_seq_max, self._failed, info.threads, info.cache_ram)
        self._reader = Reader(self._engine)
        self._dispatcher = Dispatcher(self._engine)
        self._templates = ChatTemplates(model.vocab, model.chat_template(), os.path.basename(info.path))
        self._lock = threading.Lock()  # of what is counted below
        self._kept_for = 0  # keep_prefixes() in force
        self._beside: dict[str, Any] = {}  # other contexts of its model, by their adapters

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Reserve the engine for this thread, between two steps, of a model that generates."""
        self.check_generates()
        with self._dispatcher.exclusive():
            yield

    @contextmanager
    def _reading(self) -> Iterator[Turns]:
        """Take turns to read texts, of a model that generates; what is read stays in the cache meanwhile."""
        self.check_generates()
        self._keep(1)
        try:
            yield self._dispatcher.exclusive
        finally:
            self._keep(-1)

    def snapshot_bytes(self) -> int:
        """Return the bytes of a text's state at an earlier token, which `cache_ram` is for; 0: the model needs none.

        Raises:
            TilebeamError: it writes no texts.
        """
        if not self._model.whole_forks_only:
            return 0
        with self._alone():
            self._engine.scheduler.vacate(1, 1)
            seq = self._engine.kv.open()
            self._engine.kv.extend(seq, [0])
            self._context.fill([(seq.id, 0, [0], 1)])
            self.check_decode(self._context.decode(1))
            size = self._context.sequence_bytes(seq.id, partial=True)
            self._engine.kv.close(seq)
        return size

    def _keep(self, change: int) -> None:
        """Keep finished samples in the cache while somebody wants it."""
        with self._lock:
            before, self._kept_for = self._kept_for, self._kept_for + change
            if (before == 0 or self._kept_for == 0) and not self._dispatcher.closed and not self._engine.broken:
                self._dispatcher.set_caching(self._kept_for > 0)

    def check_generates(self) -> None:
        """Raise `TilebeamError` for an embedding model, which has no logits and reads whole texts only."""
        if not self.info.generates:
            what = "rerank" if self.info.pooling == "rank" else "embed"
            raise TilebeamError(f"{self.info.path} is an embedding model, which gives no next token: use LM.{what}.")

    @contextmanager
    def raw_decode(self) -> Iterator[Context]:
        """Give the context for direct use of its batch arrays, with an empty cache before and after (for measurements).

        What `keep_prefixes` kept is forgotten; samples that run wait, and are decoded anew. In this block this thread
        can neither generate nor close the model.
        """
        with self._alone():
            self._engine.forget()
            try:
                yield self._context
            finally:
                self._engine.forget()

    def check_decode(self, code: int) -> None:
        """Raise what a return code of llama_decode stands for; afterwards the model can only be closed."""
        if code != 0:
            self._engine.fail(code)

    def _ids(self, prompt: PromptLike) -> list[int]:
        """Return the tokens of a prompt."""
        if isinstance(prompt, str | Prompt):
            return Prompt.of(prompt).tokens(self)
        refuse_messages(prompt)
        return [int(t) for t in prompt]

    # --- text -------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text.
            add_special: add the BOS (and EOS) token where the model asks for it.
            parse_special: read control tokens spelled out in the text as such. Turn it off for untrusted text.
        """
        with self._dispatcher.using():
            return self._model.vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Convert token ids to text; control tokens are left out."""
        with self._dispatcher.using():
            return self._model.vocab.text([int(t) for t in tokens])

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, which need not be whole characters; of control tokens none."""
        with self._dispatcher.using():
            return self._model.vocab.piece(token)

    def spelling(self, token: int) -> bytes:
        """Return the bytes that stand for a token in a template or a dump: those of its text, of a control token its
        name."""
        with self._dispatcher.using():
            vocab = self._model.vocab
            return vocab.spelling(token).encode() if vocab.is_control(token) else vocab.piece(token)

    def is_control(self, token: int) -> bool:
        """Tell whether a token is no text: BOS, the marks of chat templates .."""
        with self._dispatcher.using():
            return self._model.vocab.is_control(token)

    def filled_prompt(self, template: str, values: Mapping[str, str]) -> Prompt:
        """Make a prompt of a template: of "Read this: {document}" and {"document": ".."}.

        Control tokens that are spelled out in a value are text; those of the template count. Braces around other names
        stay as they are.
        """
        with self._dispatcher.using():
            return filled_prompt(self._model.vocab, template, values)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Make the prompt of a conversation, for `generate`, `stream`, searches and the like; `chat` makes and answers
        one.

        Control tokens that are spelled out in a message are text. The prompt's question is what the user said last.

        Args:
            messages: the turns, like {"role": "user", "content": "..."}.
            template: a Jinja template, or the name of one of llama.cpp's ("chatml"); None: the model's own.
            continue_final_message: the last message is the assistant's, and is continued.
            tools: functions, as OpenAI's API describes them, that the model is told of: by the template, or in words if
                it knows none.
            chat_template_kwargs: variables of the template, like {"enable_thinking": False}, which is true otherwise.

        Raises:
            TilebeamError: the model has no template (a base model), the template cannot be run, or it does not take
                these messages.
        """
        with self._dispatcher.using():
            return prompt_of(
                self._model.vocab,
                self._templates,
                messages,
                template,
                continued=continue_final_message,
                tools=tools_of(tools),
                variables=chat_template_kwargs,
            )

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> TilebeamError | None:
        """Why decoding failed for good, so that the model can only be closed; None: it did not."""
        return self._engine.broken

    def figures(self) -> EngineFigures:
        """Return the model's present load. Never waits."""
        return self._engine.figures()

    @property
    def engine(self) -> Engine:
        """The step loop, to look at its cells, samples and vocabulary. Only the thread that steps may change it, and
        what it has may be another thing after a step: look while nothing generates, or inside `raw_decode`."""
        return self._engine

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._model.vocab.size

    @property
    def n_embd(self) -> int:
        """Elements of a hidden state."""
        return self._model.n_embd

    @property
    def n_layer(self) -> int:
        """Layers."""
        return self._model.n_layer

    @property
    def n_ctx(self) -> int:
        """KV cells, shared by all sequences."""
        return self._context.n_ctx

    @property
    def n_seq_max(self) -> int:
        """Samples that decode at the same time."""
        return self.info.n_seq_max

    @property
    def device(self) -> Backend:
        """ "npu" or "cpu"."""
        return self.info.device

    @property
    def eos(self) -> int:
        """The end-of-text token, -1 if the model has none."""
        return self._model.vocab.eos

    @property
    def bos(self) -> int:
        """The begin-of-text token, -1 if the model has none."""
        return self._model.vocab.bos

    @property
    def adds_bos(self) -> bool:
        """True if the model wants its texts to begin with `bos`."""
        return self._model.vocab.adds_bos

    @property
    def max_outputs(self) -> int:
        """Most positions of one batch that may have logits."""
        return self._context.max_outputs

    @property
    def chat_template(self) -> str | None:
        """The chat template in the model's file, None if there is none."""
        return self._templates.own

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as text."""
        with self._dispatcher.using():
            return self._model.metadata()

    @property
    def description(self) -> str:
        """Family, size and type in a line, such as "qwen2 0.5B Q4_K_M"."""
        with self._dispatcher.using():
            return self._model.description()

    @property
    def n_params(self) -> int:
        """Parameters of the model."""
        return self._model.n_params

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights."""
        return self._model.n_bytes

    # --- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and all it holds. Calls that are under way in other threads or tasks end with an exception.
        Idempotent."""
        if self._dispatcher.close():
            with log_router().capture():
                self._engine.abort()
                self._resources.close()

    def __del__(self) -> None:
        dispatcher = getattr(self, "_dispatcher", None)
        if dispatcher is not None and not dispatcher.closed:
            self.close()

    def __repr__(self) -> str:
        state = f"device={self.device!r}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max}"
        if self._dispatcher.closed:
            state = "closed"
        return f"<tilebeam.LM {self.info.path!r} {state}>"

    def __reduce__(self) -> Never:
        """Raise `TilebeamError`: what pickles and copies carry is not in Python's memory."""
        raise TilebeamError(
            "An LM cannot be pickled or copied: it is a model in the memory of this process. Call tilebeam.load in "
            "the process that wants one."
        )

    def _failed(self, code: int) -> TilebeamError:
        return self._failure(code, errors_in(self._dispatcher.log))
