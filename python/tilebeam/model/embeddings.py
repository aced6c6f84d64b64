"""Texts as vectors, and documents by their relevance: what embedding models and rerankers are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tilebeam.engine.encoder import POOLINGS, Encoder, Pooling
from tilebeam.engine.reading import ReadHook
from tilebeam.errors import TilebeamError
from tilebeam.model.classifier import Classifier
from tilebeam.model.core import Core
from tilebeam.prompt import PromptLike

Floats = npt.NDArray[np.float32]


class Embeddings(Core):
    """`embed` and `rerank`."""

    @property
    def pooling(self) -> Pooling:
        """The way `embed` makes one vector of a text's hidden states unless told: as the file says, else "mean"."""
        own = self.info.pooling
        return own if own in POOLINGS else "mean"

    @property
    def embedding_size(self) -> int:
        """Elements of an embedding."""
        return self.n_embd if self.info.generates else self._model.n_embd_out

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` and `rerank` take at most."""
        return self.n_ctx - 1 if self.info.generates else self._encoder.longest

    def embed(
        self,
        texts: str | Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        truncate: bool = False,
        progress: ReadHook | None = None,
    ) -> Floats:
        """Turn texts into vectors: their tokens' hidden states behind the final norm, made one. Texts share batches.

        Args:
            texts: one text, or several texts or lists of token ids. Control tokens that are spelled out in a text are
                read as plain text.
            pooling: "mean", "cls" (the first token) or "last"; None: as the model's file says, else "mean".
            normalize: to length 1, so that the product of two is the cosine of their angle.
            truncate: of a text that is longer than the model takes, use the beginning; else it is an error.
            progress: called after every batch with (tokens seen, tokens of all texts).

        Returns:
            float32 [texts, elements]; of one text [elements].

        Raises:
            TilebeamError: a text is empty or too long, the model ranks instead, or decoding failed.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise TilebeamError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}.")
        many = [texts] if isinstance(texts, str) else list(texts)
        ids = [self.tokenize(t, parse_special=False) if isinstance(t, str) else self._ids(t) for t in many]
        if truncate:
            ids = [text[: self.longest_text] for text in ids]
        found = self._embedded(ids, pooling or self.pooling, progress)
        if normalize:
            lengths = np.linalg.norm(found, axis=1, keepdims=True)
            found /= np.where(lengths > 0, lengths, 1)
        return found[0] if isinstance(texts, str) else found

    def _embedded(self, ids: list[list[int]], pooling: Pooling, progress: ReadHook | None) -> Floats:
        if self.info.generates:
            found = self._pooled(ids, pooling, progress)
        elif self.info.pooling == "rank":
            raise TilebeamError(f"{self.info.path} ranks documents and gives no embeddings: use LM.rerank.")
        else:
            found = self._encoder.embed(self._dispatcher.exclusive, ids, pooling, progress)
        if not np.isfinite(found).all():
            raise TilebeamError("The model computed embeddings that are not numbers: its weights are damaged.")
        return found

    def _pooled(self, ids: list[list[int]], pooling: Pooling, progress: ReadHook | None) -> Floats:
        """Return hidden states of a model that generates, [texts, n_embd]."""
        with self._reading() as turns:
            readings = self._reader.pooled(turns, ids, pooling, progress)
        return np.array([r.hidden[0] for r in readings], np.float32).reshape(len(ids), self.n_embd)

    def rerank(self, query: str, documents: Sequence[str], *, progress: ReadHook | None = None) -> Floats:
        """Rate how relevant documents are to a query, by a model made for it (its file says pooling by rank).

        Args:
            query: what is asked for.
            documents: texts. Query and document are written as the model's file says (its chat template "rerank"), or
                one after the other with the model's own separators.
            progress: called after every batch with (tokens seen, tokens of all texts).

        Returns:
            float32 [documents], in their order; the larger the more relevant. What llama.cpp computes: of a classifier
            with one output its value, of Qwen 3 the probability of the first label.

        Raises:
            TilebeamError: the model is no reranker, a text is too long, or decoding failed.
        """
        return self.rank([*self.rerank_prompts(query, documents)], progress=progress)

    def rank(self, prompts: Sequence[Sequence[int]], *, progress: ReadHook | None = None) -> Floats:
        """Rate as `rerank` does, from what `rerank_prompts` gave.

        Args:
            prompts: the tokens of a query and a document each.
            progress: see `rerank`.
        """
        if self.info.pooling != "rank":
            raise TilebeamError(
                f"{self.info.path} is no rerank model: its file does not say pooling by rank. Compare embeddings "
                "(LM.embed) instead."
            )
        ids = [list(prompt) for prompt in prompts]
        if self.info.generates:
            found = self._classifier(self._pooled(ids, "last", progress))
        else:
            found = self._encoder.ranks(self._dispatcher.exclusive, ids, progress)
        if not np.isfinite(found).all():
            raise TilebeamError("The model computed scores that are not numbers: its weights are damaged.")
        return found[:, 0]

    def rerank_prompts(self, query: str, documents: Iterable[str]) -> Iterator[list[int]]:
        """Make the tokens that `rerank` reads of a query and each document, one by one."""
        with self._dispatcher.using():
            vocab, template = self._model.vocab, self._model.chat_template("rerank")
            asked = vocab.tokenize(query, False, False)
            plain = vocab.tokenize(query, False, True) == asked
        for document in documents:
            with self._dispatcher.using():
                said = vocab.tokenize(document, False, False)
                if template is None:
                    ids = self._separated(asked, said)
                elif plain and vocab.tokenize(document, False, True) == said:
                    before, between, after = _around(template)
                    ids = vocab.tokenize(before + query + between + document + after, False, True)
                else:  # its control tokens, those of query and document are text
                    head, middle, tail = (vocab.tokenize(text, False, True) for text in _around(template))
                    ids = [*head, *asked, *middle, *said, *tail]
            yield ids

    def _separated(self, asked: Sequence[int], said: Sequence[int]) -> list[int]:
        """Return query and document with the model's own separators."""
        vocab = self._model.vocab
        eos = [vocab.sep if vocab.eos < 0 else vocab.eos] if vocab.adds_eos else []
        sep = [vocab.sep] if vocab.adds_sep else []
        bos = [vocab.bos] if vocab.adds_bos else []
        return [*bos, *asked, *eos, *sep, *said, *eos]

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._context, self._engine.fail)

    @cached_property
    def _classifier(self) -> Classifier:
        return Classifier(self.info.path, self.info.architecture)


def _around(template: str) -> tuple[str, str, str]:
    """Return what a template writes before the query, between query and document, and behind that."""
    before, _, rest = template.partition("{query}")
    between, _, after = rest.partition("{document}")
    return before, between, after
