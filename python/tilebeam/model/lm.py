"""A loaded model: text in, samples out. What `tilebeam.load` returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tilebeam.engine.draft_model import DraftModel
from tilebeam.engine.observer import Observer
from tilebeam.engine.speculation import FEW_SAMPLES, Speculation
from tilebeam.errors import TilebeamError
from tilebeam.model.embeddings import Embeddings
from tilebeam.model.generating import Generating
from tilebeam.model.reads import Reads


class LM(Generating, Reads, Embeddings):
    """A model with one context, ready to decode many sequences at a time.

    Use it as a context manager or call `close`. Calls of `generate` from several threads, and their streaming and
    asynchronous forms, share batches. `read`, `logits` and `raw_decode` need the context for themselves: they wait
    until what was asked for before has ended, and what is asked for later waits for them. In a child of fork() every
    call raises `TilebeamError`: load the model there.
    """

    @contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        """While this lasts, the KV cells of finished samples stay, as long as there is room: a prompt that begins with
        one of them (its tokens and those of its text) forks it, and only what is new is decoded. Reentrant.

        Results then depend, in the last bits of the logits, on what was kept before; the same calls in the same order
        give the same texts, where no tokens are guessed ahead.
        """
        self._check_generates()
        with self._dispatcher.using():
            self._keep(1)
        try:
            yield
        finally:
            self._keep(-1)

    def _keep(self, change: int) -> None:
        with self._lock:
            before, self._kept_for = self._kept_for, self._kept_for + change
            if (before == 0 or self._kept_for == 0) and not self._dispatcher.closed and not self._engine.broken:
                self._dispatcher.set_caching(self._kept_for > 0)

    def speculate(self, lookup: bool | None = None, draft: LM | None = None) -> None:
        """Guess tokens ahead from now on, by look-up, by a draft model, or by both; by neither: stop guessing.

        Args:
            lookup: guess from the prompt, the other samples and earlier texts. None: without a draft model, in steps
                of few samples (at most `FEW_SAMPLES`), if this model's memory can go back to an earlier token.
            draft: a model that nothing else uses; it is closed with this one.

        Raises:
            TilebeamError: this model's memory cannot go back to an earlier token, or the draft model does not fit it;
                the draft model is closed then.
        """
        with self._reading(), ExitStack() as stack:
            if draft is not None:
                stack.callback(draft.close)
            reason = self._engine.drafting_off
            if reason and (lookup or draft is not None):
                raise TilebeamError(f"{self.info.path} cannot speculate: {reason}.")
            model = None if draft is None else DraftModel(draft._context, self._context)
            if model is not None:
                stack.callback(model.close)
            drafter = None
            if lookup or model is not None:
                drafter = Speculation(bool(lookup), model)
            elif lookup is None and not reason:
                drafter = Speculation(most_samples=FEW_SAMPLES)
            self._engine.use_drafter(drafter)
            self._resources.push(stack.pop_all())

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of all phases of the engine's work from now on; None: of none any more. A model has one
        observer at a time."""
        self._engine.observe(observer)
