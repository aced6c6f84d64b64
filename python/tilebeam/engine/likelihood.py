"""Which tokens of a prompt with its continuations are scored, and at which positions of which text they are read.

A prompt and a continuation are tokenized as one text, as the model would meet them. The continuation begins with the
first token that is not one of the prompt's own; white space at the prompt's end counts as the continuation's. So does
all of a token that covers the border. All continuations of a prompt begin at the same token, the first one at which any
of them does: their sums are log-probabilities of texts with the same beginning, and can be compared.

A prediction that several continuations share is read once: continuations of one token cost no more than their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilebeam.engine.kv_cache import common_prefix
from tilebeam.engine.reading import TokenReading
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab, check_tokens
from tilebeam.outputs import Likelihood


@dataclass(frozen=True)
class Continued:
    """A prompt with its continuations.

    Attributes:
        texts: token ids of prompt and continuation, one list for each.
        start: the first token that is scored, at least 1.
        sizes: characters and bytes of each continuation's text.
    """

    texts: list[list[int]]
    start: int
    sizes: list[tuple[int, int]]


def continued_text(vocab: Vocab, prompt: str, continuations: Sequence[str], parse_special: bool) -> Continued:
    """Cut texts at the border of prompt and continuation.

    Raises:
        TilebeamError: a continuation is empty, or the prompt is and the model has no token to put in its place.
    """
    for i, continuation in enumerate(continuations):
        if not continuation:
            raise TilebeamError(f"Continuation {i} is empty.")
    own = _tokens(vocab, prompt.rstrip(), parse_special)
    texts = [_tokens(vocab, prompt + continuation, parse_special) for continuation in continuations]
    start = min((common_prefix(own, text) for text in texts), default=len(own))
    if start == 0:  # no token of the prompt is left to predict the first one
        texts = [[_first(vocab), *text] for text in texts]
        start = 1
    for i, text in enumerate(texts):
        if len(text) == start:
            raise TilebeamError(f"Continuation {i} adds no token to its prompt.")
    return Continued(texts, start, [(len(c), len(c.encode("utf-8", "surrogatepass"))) for c in continuations])


def continued_ids(vocab: Vocab, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> Continued:
    """Take token ids as they are, without a BOS token being added; TilebeamError: prompt or continuation is empty."""
    own = [int(t) for t in prompt]
    if not own:
        raise TilebeamError("The prompt has no tokens.")
    tails = [[int(t) for t in continuation] for continuation in continuations]
    for i, tail in enumerate(tails):
        if not tail:
            raise TilebeamError(f"Continuation {i} is empty.")
        check_tokens(tail, vocab.size, f"Continuation {i}")
    raws = [b"".join(map(vocab.piece, tail)) for tail in tails]
    sizes = [(len(raw.decode("utf-8", "replace")), len(raw)) for raw in raws]
    return Continued([own + tail for tail in tails], len(own), sizes)


def _tokens(vocab: Vocab, text: str, parse_special: bool) -> list[int]:
    """Return a text's tokens as at the beginning of a longer one: with BOS, without EOS."""
    tokens = vocab.tokenize(text, True, parse_special)
    if vocab.adds_eos and tokens and tokens[-1] == vocab.eos:
        del tokens[-1]
    return tokens


def _first(vocab: Vocab) -> int:
    """Return what stands in front of a text that has nothing in front of it."""
    token = vocab.bos if vocab.bos >= 0 else vocab.eos
    if token < 0:
        raise TilebeamError("The prompt has no token of its own, and the model has neither BOS nor EOS to begin with.")
    return token


@dataclass
class _Node:
    """A beginning of texts: which text reads it, and how texts go on."""

    owner: int
    next: dict[int, _Node] = field(default_factory=dict)


class LikelihoodPlan:
    """What to read for some prompts with continuations, as arguments of `Reader.logprobs`, and what comes of it.

    Attributes:
        targets: token ids of each text, as far as they must be decoded.
        positions, tokens: for each text, positions and the tokens whose probability behind them is asked for.

    Args:
        prompts: with their continuations.
        n_ctx: KV cells of the model.

    Raises:
        TilebeamError: a text is longer than the context.
    """

    def __init__(self, prompts: Sequence[Continued], n_ctx: int) -> None:
        self._prompts = prompts
        self.targets: list[list[int]] = []
        self.positions: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self._rows: list[list[tuple[int, int]]] = []  # of each text: (text, row) that holds each token
        for i, prompt in enumerate(prompts):
            for j, text in enumerate(prompt.texts):
                if len(text) > n_ctx:
                    raise TilebeamError(
                        f"Prompt {i} with continuation {j} has {len(text)} tokens, the context {n_ctx}: shorten it, "
                        "or load the model with a larger n_ctx."
                    )
            self._add(prompt)

    def _add(self, prompt: Continued) -> None:
        first = len(self.targets)
        root = _Node(first)
        for number, text in enumerate(prompt.texts, first):
            self.targets.append(text)
            self.positions.append([])
            self.tokens.append([])
            rows: list[tuple[int, int]] = []
            node = root
            for at in range(prompt.start, len(text)):
                asked = self.positions[node.owner]
                rows.append((node.owner, len(asked)))
                asked.append(at - 1)
                self.tokens[node.owner].append(text[at])
                node = node.next.setdefault(text[at], _Node(number))
            self._rows.append(rows)
        for number in range(first, len(self.targets)):  # the last token's own predictions are nobody's
            self.targets[number] = self.targets[number][: max(self.positions[number], default=0) + 1]

    def results(self, readings: Sequence[TokenReading]) -> list[list[Likelihood]]:
        """Return for each prompt the likelihoods of its continuations."""
        found: list[list[Likelihood]] = []
        number = 0
        for prompt in self._prompts:
            found.append([])
            for text, (characters, size) in zip(prompt.texts, prompt.sizes, strict=True):
                rows = self._rows[number]
                cost = readings[number]
                found[-1].append(
                    Likelihood(
                        text[prompt.start :],
                        [float(readings[owner].logprobs[row]) for owner, row in rows],
                        all(readings[owner].likeliest[row] for owner, row in rows),
                        characters,
                        size,
                        cost.decoded_tokens,
                        cost.cached_tokens,
                        cost.seconds,
                    )
                )
                number += 1
        return found
