"""Requests of many kinds for one server, each with a check of its answer against its question.

Texts that a request may draw freely are held to a pattern around a constant of its own. Numbers (embeddings, ranks,
log-probabilities) are compared with those that the server gave for the same question while it did nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
Post = Callable[[str, Json], Any]  # path and body of a request; the answer, or an exception

COMPLETIONS = "/v1/completions"
# A batch's company changes the last bits of activations, which 8-bit scales round: what numbers may differ by.
LEAST_COSINE = 0.99
MOST_RANK = 0.05
MOST_LOGPROB = 0.15  # in the mean over a text's tokens
_POOL = 12  # questions of a kind that are compared with references


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        path, body: what is sent.
        wrong: what is wrong about an answer; None: nothing.
    """

    path: str
    body: Json
    wrong: Callable[[Any], str | None]


@dataclass(frozen=True)
class Offer:
    """What a server can be asked besides completions and embeddings.

    Attributes:
        n_vocab: its model's tokens.
        ranks: its model ranks documents.
        head: it has a reward head of its own.
    """

    n_vocab: int
    ranks: bool = False
    head: bool = False


class Questions:
    """Draws requests.

    Args:
        post: asks the server, which must have nothing else to do while this object is made.
        offer: what can be asked.
        longest: tokens of the longest answer.
    """

    def __init__(self, post: Post, offer: Offer, longest: int) -> None:
        self._offer, self._longest = offer, longest
        rng = np.random.default_rng(7)
        self._texts = [f"number {i}: " + _words(rng, int(rng.integers(1, 60))) for i in range(_POOL)]
        self._vectors = _vectors(post("/v1/embeddings", {"input": self._texts}))
        self._ranks = (
            _ranks(post("/v1/rerank", {"query": self._texts[0], "documents": self._texts})) if offer.ranks else {}
        )
        self._prompts = [self._tokens(rng, 8, 48) for _ in range(_POOL)]
        self._echoes = [_prompt_logprobs(post(COMPLETIONS, self._echo(i))) for i in range(_POOL)]
        self._said = [_drawn(post(COMPLETIONS, self._forced(i))) for i in range(_POOL)]

    def kinds(self) -> Mapping[str, Callable[[np.random.Generator], Asked]]:
        found = {
            "plain": self.plain,
            "one token": self.one_token,
            "own constant": self.own_constant,
            "forced": self.forced,
            "embeddings": self.embeddings,
            "echo": self.echo,
        }
        if self._offer.ranks:
            found["rerank"] = self.rerank
        if self._offer.head:
            found["search"] = self.search
        return found

    # --- texts ------------------------------------------------------------------------------------------------------

    def plain(self, rng: np.random.Generator) -> Asked:
        return self._counted(rng, int(rng.integers(self._longest // 8, self._longest + 1)))

    def one_token(self, rng: np.random.Generator) -> Asked:
        return self._counted(rng, 1)

    def _counted(self, rng: np.random.Generator, count: int) -> Asked:
        body = {"prompt": self._tokens(rng, 8, 64), "max_tokens": count, "ignore_eos": True, "seed": _seed(rng)}

        def wrong(answer: Any) -> str | None:
            found = answer["usage"]["completion_tokens"]
            return None if found == count else f"{found} tokens instead of {count}"

        return Asked(COMPLETIONS, body, wrong)

    def own_constant(self, rng: np.random.Generator) -> Asked:
        """Ask for a text that nobody else may get, of one or several samples."""
        pattern = _pattern(rng, self._longest)
        body = {"prompt": self._tokens(rng, 8, 64), "guided_regex": pattern, "n": int(rng.choice([1, 1, 1, 3]))}
        body |= {"max_tokens": 4 * self._longest, "seed": _seed(rng)}

        def wrong(answer: Any) -> str | None:
            texts = [choice["text"] for choice in answer["choices"]]
            return _unlike(pattern, texts) if len(texts) == body["n"] else f"{len(texts)} samples"

        return Asked(COMPLETIONS, body, wrong)

    def search(self, rng: np.random.Generator) -> Asked:
        """Ask for a search whose candidates the model's own reward head rates; it tells all of them."""
        pattern = _pattern(rng, self._longest // 2)
        wanted = {"method": "best-of-n", "budget": 4, "scorer": "reward", "candidates": True}
        body = {"prompt": _words(rng, 12), "guided_regex": pattern, "search": wanted}
        body |= {"max_tokens": 4 * self._longest, "seed": _seed(rng)}

        def wrong(answer: Any) -> str | None:
            (choice,) = answer["choices"]
            found, scores = choice["search"]["candidates"], choice["search"]["scores"]
            if len(found) != 4 or None in scores:
                return f"{len(found)} candidates with scores {scores}"
            return _unlike(pattern, [choice["text"], *(c["text"] for c in found)])

        return Asked(COMPLETIONS, body, wrong)

    # --- numbers ----------------------------------------------------------------------------------------------------

    def forced(self, rng: np.random.Generator) -> Asked:
        """One token over and over, of which the log-probabilities are compared: a KV cell of another text would change
        them."""
        i = int(rng.integers(_POOL))
        tokens, reference = self._said[i]

        def wrong(answer: Any) -> str | None:
            found, logprobs = _drawn(answer)
            return _moved(logprobs, reference) if found == tokens else f"{found} instead of {tokens}"

        return Asked(COMPLETIONS, self._forced(i), wrong)

    def _forced(self, i: int) -> Json:
        body = {"prompt": self._prompts[i], "logit_bias": {str(self._prompts[i][0]): 100}, "temperature": 0}
        return body | {"max_tokens": 24, "ignore_eos": True, "logprobs": 0}

    def echo(self, rng: np.random.Generator) -> Asked:
        i = int(rng.integers(_POOL))
        return Asked(COMPLETIONS, self._echo(i), lambda a: _moved(_prompt_logprobs(a), self._echoes[i]))

    def _echo(self, i: int) -> Json:
        return {"prompt": self._prompts[i], "echo": True, "logprobs": 0, "max_tokens": 0}

    def embeddings(self, rng: np.random.Generator) -> Asked:
        chosen = rng.permutation(_POOL)[: rng.integers(1, 6)].tolist()

        def wrong(answer: Any) -> str | None:
            nearness = _vectors(answer) @ self._vectors.T
            own = [nearness[row, i] for row, i in enumerate(chosen)]
            if min(own) < LEAST_COSINE:
                return f"a cosine of {min(own):.3f} with the reference"
            return None if nearness.argmax(axis=1).tolist() == chosen else "nearer to another text's reference"

        return Asked("/v1/embeddings", {"input": [self._texts[i] for i in chosen]}, wrong)

    def rerank(self, rng: np.random.Generator) -> Asked:
        chosen = rng.permutation(_POOL)[: rng.integers(1, 6)].tolist()
        body = {"query": self._texts[0], "documents": [self._texts[i] for i in chosen]}

        def wrong(answer: Any) -> str | None:
            far = max(abs(score - self._ranks[chosen[i]]) for i, score in _ranks(answer).items())
            return None if far <= MOST_RANK else f"a score {far:.3f} off the reference"

        return Asked("/v1/rerank", body, wrong)

    def _tokens(self, rng: np.random.Generator, least: int, most: int) -> list[int]:
        n_vocab = self._offer.n_vocab
        return rng.integers(n_vocab // 2, n_vocab * 9 // 10, int(rng.integers(least, most))).tolist()


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 31))


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(["the", "of", "and", "number", "people", "question", "answer", "time"], count))


def _pattern(rng: np.random.Generator, longest: int) -> str:
    """Return a regular expression: a unique constant, letters, and the constant again."""
    own = f"k{rng.integers(10**8):08}"
    return f"{own}[a-z]{{{rng.integers(4, max(8, longest // 2))}}}{own}"


def _unlike(pattern: str, texts: list[str]) -> str | None:
    odd = [text for text in texts if not re.fullmatch(pattern, text)]
    return f"{odd[0]!r} for {pattern}" if odd else None


def _vectors(answer: Any) -> npt.NDArray[np.float32]:
    return np.array([row["embedding"] for row in answer["data"]], np.float32)


def _ranks(answer: Any) -> dict[int, float]:
    return {row["index"]: row["relevance_score"] for row in answer["results"]}


def _prompt_logprobs(answer: Any) -> list[float]:
    return [float(x) for x in answer["choices"][0]["logprobs"]["token_logprobs"][1:]]


def _drawn(answer: Any) -> tuple[list[str], list[float]]:
    told = answer["choices"][0]["logprobs"]
    return told["tokens"], [float(x) for x in told["token_logprobs"]]


def _moved(found: list[float], reference: list[float]) -> str | None:
    if len(found) != len(reference):
        return f"{len(found)} log-probabilities instead of {len(reference)}"
    far = float(np.abs(np.subtract(found, reference)).mean())
    return None if far <= MOST_LOGPROB else f"log-probabilities {far:.3f} off the reference, in the mean"
