"""Reading given texts without generating: logits, hidden states, likelihoods, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from tilebeam.engine.likelihood import Continued, LikelihoodPlan, continued_ids, continued_text
from tilebeam.engine.reading import ReadHook, Reading, TokenReading
from tilebeam.errors import TilebeamError
from tilebeam.model.core import Core
from tilebeam.native.llama import check_tokens
from tilebeam.outputs import Likelihood
from tilebeam.prompt import Prompt, PromptLike


class Reads(Core):
    """`read` and its kin."""

    def logits(self, tokens: Sequence[int], *, chunk: int | None = None) -> npt.NDArray[np.float32]:
        """Return logits at every position of one sequence.

        Args:
            tokens: token ids, at most n_ctx.
            chunk: tokens per batch; None: as many as fit. 1 decodes token by token.

        Returns:
            float32 [len(tokens), n_vocab]; row i is the prediction for token i + 1.
        """
        ids = [int(t) for t in tokens]
        with self.raw_decode() as context:
            if not ids or len(ids) > self._context.n_ctx:
                raise TilebeamError(f"logits() takes 1 to {self._context.n_ctx} tokens, not {len(ids)}.")
            check_tokens(ids, self.n_vocab)
            result = np.empty((len(ids), self.n_vocab), np.float32)
            step = min(chunk or context.max_outputs, context.max_outputs)
            if step < 1:
                raise TilebeamError(f"chunk must be at least 1, not {chunk}.")
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                context.fill([(0, start, part, len(part))])
                self.check_decode(context.decode(len(part)))
                for i in range(len(part)):
                    result[start + i] = context.logits(i)
            return result

    def read(
        self,
        prompts: Sequence[PromptLike],
        positions: Sequence[Sequence[int]],
        tokens: Sequence[int] | None = None,
        *,
        progress: ReadHook | None = None,
    ) -> list[Reading]:
        """Read what the model expects after given positions of texts, without generating; see `keep_prefixes`.

        Args:
            prompts: texts, or lists of token ids.
            positions: for each prompt, indices into its tokens (negative ones count from the end), in any order.
            tokens: whose logits are wanted; None: of the whole vocabulary.
            progress: called after every batch with (tokens decoded, tokens to decode).

        Returns:
            One `Reading` per prompt: float32 logits [positions, tokens], and what it cost.

        Raises:
            TilebeamError: a prompt is empty or longer than the context, a position lies outside, or decoding failed.
        """
        ids = [self._ids(p) for p in prompts]
        with self._reading() as turns:
            return self._reader.logits(turns, ids, positions, tokens, progress)

    def hidden(
        self, prompts: Sequence[PromptLike], positions: Sequence[Sequence[int]], *, progress: ReadHook | None = None
    ) -> list[Reading]:
        """Return hidden states behind the final norm at given positions of texts: what a value head or classifier
        reads.

        As `read`, with `Reading.hidden` instead of logits: float32 [positions, n_embd].
        """
        ids = [self._ids(p) for p in prompts]
        with self._reading() as turns:
            return self._reader.hidden(turns, ids, positions, progress)

    def loglikelihood(
        self,
        prompt: PromptLike,
        continuations: Sequence[PromptLike],
        *,
        parse_special: bool = True,
        progress: ReadHook | None = None,
    ) -> list[Likelihood]:
        """Compute how likely each of several continuations of a prompt is; see `loglikelihoods`.

        lm.loglikelihood("The capital of France is", [" Paris", " Lyon"])[0].logprob
        """
        return self.loglikelihoods([(prompt, continuations)], parse_special=parse_special, progress=progress)[0]

    def loglikelihoods(
        self,
        prompts: Sequence[tuple[PromptLike, Sequence[PromptLike]]],
        *,
        parse_special: bool = True,
        progress: ReadHook | None = None,
    ) -> list[list[Likelihood]]:
        """Compute how likely continuations of prompts are, without generating. Sequences share batches, and what texts
        have in common is decoded once; see `keep_prefixes`.

        Texts: prompt and continuation are tokenized as one text, put together as they are (a space between them must
        be in one of them). Scored are its tokens from the first one that the prompt alone, without white space at its
        end, does not have: a token over the border belongs to the continuation. All continuations of one prompt are
        scored from the same token on, so that sums can be compared. In front of an empty prompt stands BOS, or EOS in
        models without.

        Token ids: taken as they are, without a BOS token being added; every token of the continuation is scored.

        Args:
            prompts: pairs of a prompt and its continuations; all texts or all token ids.
            parse_special: read control tokens spelled out in texts as such. Turn it off for untrusted text.
            progress: called after every batch with (tokens decoded, tokens to decode).

        Returns:
            For each prompt a `Likelihood` per continuation.

        Raises:
            TilebeamError: prompt and continuation do not fit the context, a continuation is empty, or decoding failed.
        """
        plan = LikelihoodPlan([self._continued(*pair, parse_special) for pair in prompts], self._context.n_ctx)
        with self._reading() as turns:
            return plan.results(self._reader.logprobs(turns, plan.targets, plan.positions, plan.tokens, progress))

    def token_logprobs(
        self, prompts: Sequence[PromptLike], *, top: int = 0, progress: ReadHook | None = None
    ) -> list[TokenReading]:
        """Compute how likely each token of some texts is after those before it.

        Args:
            prompts: texts, or lists of token ids, taken as they are.
            top: how many of the likeliest tokens to tell at each place.
            progress: called after every batch with (tokens decoded, tokens to decode).

        Returns:
            One `TokenReading` per prompt, an entry for each token but the first.

        Raises:
            TilebeamError: a prompt is empty or longer than the context, or decoding failed.
        """
        ids = [self._ids(p) for p in prompts]
        places = [list(range(len(i) - 1)) for i in ids]
        with self._reading() as turns:
            return self._reader.logprobs(turns, ids, places, [i[1:] for i in ids], progress, top)

    def _continued(self, prompt: PromptLike, continuations: Sequence[PromptLike], parse_special: bool) -> Continued:
        if isinstance(continuations, str):
            raise TilebeamError("Continuations are a list of texts, or of token ids, not one text.")
        if isinstance(prompt, Prompt):
            prompt = prompt.text if prompt.token_ids is None else prompt.ids
        with self._dispatcher.using():
            vocab = self._model.vocab
            texts = [c for c in continuations if isinstance(c, str)]
            if isinstance(prompt, str) and len(texts) == len(continuations):
                return continued_text(vocab, prompt, texts, parse_special)
            if isinstance(prompt, str) or texts:
                raise TilebeamError("Prompt and continuations must be all texts, or all token ids.")
            return continued_ids(vocab, prompt, cast(Sequence[Sequence[int]], continuations))
