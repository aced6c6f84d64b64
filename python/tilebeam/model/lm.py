"""A loaded model: text in, samples out. What `tilebeam.load` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tilebeam.engine.draft_head import DraftHead
from tilebeam.engine.draft_model import DraftModel
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.observer import Observer
from tilebeam.engine.speculation import FEW_SAMPLES, MOST_WITH_HEAD, Speculation
from tilebeam.errors import TilebeamError
from tilebeam.model.chatting import Chatting
from tilebeam.model.embeddings import Embeddings
from tilebeam.model.lora import Lora
from tilebeam.model.reads import Reads
from tilebeam.native.fork_locks import free_in_children


class LM(Chatting, Reads, Embeddings):
    """A model with one context, ready to decode many sequences at a time.

    Use it as a context manager or call `close`. Calls of `generate` from several threads, and their streaming and
    asynchronous forms, share batches. What only reads (`read`, `embed`, `logits` ..) gets the context
    between two steps; what generates goes on behind it, and long readings take turns with it. In a child of fork()
    every call raises `TilebeamError`: load the model there.

    Attributes:
        head: its draft head; None: it was loaded without one.
        open_beside: makes another context of its model, with one more adapter; see `beside`.
    """

    head: DraftHead | None = None
    open_beside: Callable[[Lora], LM]
    _making = free_in_children()  # a context beside another

    def beside(self, lora: Lora) -> LM:
        """Return another context of this model, with one more LoRA adapter in force; the weights are in memory once.

        It is made when it is asked for first, and closed with this model.

        Args:
            lora: a file, or a pair (file, scale).

        Raises:
            TilebeamError: the adapter is not one of this model, or there is no memory for another KV cache.
        """
        self.check_generates()
        with self._dispatcher.using(), self._making:
            made = self._beside.get(str(lora))
            if made is None or made._dispatcher.closed:
                self._beside[str(lora)] = made = self.open_beside(lora)
                self._resources.callback(made.close)
            return made

    @contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        """Keep the KV cells of finished samples meanwhile, as long as there is room: a prompt that begins with
        one of them (its tokens and those of its text) forks it, and only what is new is decoded. Reentrant.

        Logits then depend a little on what was kept before, unless the model was loaded with ``deterministic=True``;
        without it the same calls in the same order give the same texts, where no tokens are guessed ahead.
        """
        self.check_generates()
        with self._dispatcher.using():
            self._keep(1)
        try:
            yield
        finally:
            self._keep(-1)

    def speculate(self, lookup: bool | None = None, draft: LM | None = None) -> None:
        """Guess tokens ahead from now on, by look-up or by a draft model; by neither: stop guessing. A model that was
        loaded with a draft head guesses by both look-up and head, unless `lookup` is False.

        Args:
            lookup: guess from the prompt, the other samples and earlier texts. None: without a draft model, in steps
                of few samples (at most `FEW_SAMPLES`).
            draft: a model that nothing else uses; it is closed with this one.

        Raises:
            TilebeamError: both are asked for, the draft model does not fit this one, or this one was loaded with
                ``deterministic=True``. The draft model is closed then.
        """
        with self._alone(), ExitStack() as stack:
            if draft is not None:
                stack.callback(draft.close)
                draft.check_generates()
            if draft is not None and lookup:
                raise TilebeamError("lookup and a draft model exclude each other: choose one source of guesses.")
            if draft is not None or lookup:
                self._check_guesses()
            drafter = None
            if self.head is not None and draft is None and lookup is not False:
                drafter = Speculation(self.head, MOST_WITH_HEAD)
            elif draft is not None:
                drafter = Speculation(DraftModel(draft._context, self._context))
            elif lookup:
                drafter = Speculation()
            elif lookup is None and not self.info.deterministic:
                drafter = Speculation(most_samples=FEW_SAMPLES)
            self._engine.use_drafter(drafter)
            self._resources.push(stack.pop_all())

    def use_drafter(self, drafter: Drafter | None) -> None:
        """Guess tokens ahead with a drafter of your own from now on; None: stop guessing. It replaces what `speculate`
        chose.

        Raises:
            TilebeamError: it was loaded with ``deterministic=True``.
        """
        with self._alone():
            if drafter is not None:
                self._check_guesses()
            self._engine.use_drafter(drafter)

    def _check_guesses(self) -> None:
        if self.info.deterministic:
            raise TilebeamError(f"{self.info.path} was loaded with deterministic=True, which guesses no tokens.")

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of all phases of the engine's work from now on; None: of none any more. A model has one
        observer at a time."""
        self._engine.observe(observer)
