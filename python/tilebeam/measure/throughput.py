"""Throughput of loaded models: the timed loop that `tilebeam bench` and the scripts in bench/ share.

As in llama-bench and llama-batched-bench, tokens are random, nothing is sampled, and only llama_decode is timed. The
models run with the very context that `LM.generate` uses (one unified KV cache). What is compared is interleaved
(A B A B ..) in one process, so that a machine that slows down slows both; ratios are taken pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from tilebeam.errors import TilebeamError
from tilebeam.measure.machine import Cost, Stopwatch
from tilebeam.model.lm import LM


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        n_prompt: prompt tokens per sequence, decoded in batches ("pp").
        n_gen: tokens per sequence that follow one by one ("tg"), one of every sequence per batch.
        n_parallel: sequences.
        n_depth: tokens of every sequence that are in the cache before the clock starts.
        shared: the n_depth tokens are one prompt whose cells all sequences share.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_parallel: int = 1
    n_depth: int = 0
    shared: bool = False

    @property
    def name(self) -> str:
        """Its name in llama-bench's style: "pp512", "tg128", "pp512+tg128", "tg32 @ d1024"."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        depth = f" @ d{self.n_depth}{' shared' if self.shared else ''}" if self.n_depth else ""
        return "+".join(parts) + depth

    @property
    def tokens(self) -> int:
        """Tokens that are timed."""
        return self.n_parallel * (self.n_prompt + self.n_gen)

    @property
    def cells(self) -> int:
        """KV cells that it needs."""
        return self.tokens + self.n_depth * (1 if self.shared else self.n_parallel)

    def validate(self) -> None:
        """Raise `TilebeamError` if there is nothing to time or a number is out of range."""
        if min(self.n_prompt, self.n_gen, self.n_depth) < 0:
            raise TilebeamError("Token counts must not be negative.")
        if self.n_prompt + self.n_gen == 0:
            raise TilebeamError("There is nothing to time: both the prompt and the generation are 0 tokens long.")
        if not 1 <= self.n_parallel <= 256:
            raise TilebeamError(f"Parallel sequences must be between 1 and 256, not {self.n_parallel}.")


class Runner:
    """Times cases on one model; it must have room for `Case.cells` tokens and `Case.n_parallel` sequences."""

    def __init__(self, lm: LM) -> None:
        self._lm = lm
        self._context = lm._context
        self._rng = np.random.default_rng(0)
        self._kept: int | None = None  # tokens of the shared prompt in the cache; None outside `keeping`

    def check(self, case: Case) -> None:
        """Raise `TilebeamError` if the model was not loaded with enough room for this case."""
        case.validate()
        info = self._lm.info
        if case.n_parallel > info.n_seq_max:
            raise TilebeamError(f"{case.n_parallel} sequences, but the model was loaded for {info.n_seq_max}.")
        if case.cells > info.n_ctx:
            raise TilebeamError(
                f"{case.name} x {case.n_parallel} needs {case.cells} KV cells, but the model has {info.n_ctx}."
            )

    def run(self, case: Case) -> Cost:
        """Run a case once; what its timed part cost.

        Raises:
            TilebeamError: no room for it, or a decode failed (`NpuError` if the NPU did).
        """
        self.check(case)
        if self._kept is None:
            with self.keeping():
                return self.run(case)
        self._fill_depth(case)
        watch = Stopwatch()
        if case.n_prompt:
            self._step(case.n_parallel, case.n_depth, case.n_prompt)
        for step in range(case.n_gen):
            self._step(case.n_parallel, case.n_depth + case.n_prompt + step)
        return watch.cost()

    def warm_up(self, case: Case) -> None:
        """Touch what the case uses: its prompt once, and one generated token."""
        self.run(Case(case.n_prompt, min(case.n_gen, 1), case.n_parallel, case.n_depth, case.shared))

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep a shared prompt in the cache within this block: the next run decodes only what its own prompt adds.

        The model is this runner's alone meanwhile (`LM.raw_decode`).
        """
        with self._lm.raw_decode():
            self._kept = 0
            try:
                yield
            finally:
                self._kept = None

    def _fill_depth(self, case: Case) -> None:
        """Fill the cache as the case wants it before the clock starts, whatever the run before left in it."""
        context, kept, depth = self._context, self._kept or 0, case.n_depth
        if not (case.shared and depth):
            context.clear()
            self._kept = 0
            if depth:
                self._step(case.n_parallel, 0, depth)
            return
        for seq in range(1, context.n_seq_max):
            context.drop(seq)
        if not context.truncate(0, min(kept, depth)):
            context.clear()
            kept = 0
        if depth > kept:
            self._step(1, kept, depth - kept)
        self._kept = depth
        for seq in range(1, case.n_parallel):
            context.fork(0, seq, depth)

    def _step(self, n_parallel: int, start: int, length: int = 1) -> None:
        """Decode `length` tokens of each sequence, one sequence after the other, in full batches."""
        c = self._context
        seq = np.repeat(np.arange(n_parallel, dtype=np.int32), length)
        pos = np.tile(np.arange(start, start + length, dtype=np.int32), n_parallel)
        for first in range(0, len(seq), c.n_batch):
            part = slice(first, first + c.n_batch)
            n = len(seq[part])
            c.seq[:n], c.pos[:n] = seq[part], pos[part]
            c.output[:n] = pos[part] == start + length - 1
            c.token[:n] = self._rng.integers(0, self._lm.n_vocab, n)
            self._lm.check_decode(c.decode(n))


def compare(
    models: Mapping[str, LM],
    case: Case,
    repetitions: int,
    *,
    warmup: bool = True,
    on_run: Callable[[str, float | None], None] | None = None,
) -> dict[str, list[Cost]]:
    """Time a case on several models in turn: A B A B ..

    Args:
        models: loaded models by name, in the order in which they take turns.
        case: what to time.
        repetitions: timed runs of each model.
        warmup: an untimed run of each model first.
        on_run: called after every run with the model's name and the seconds, None for a warmup.

    Returns:
        The cost of every run by model; the i-th runs of all models stood next to each other.
    """
    if repetitions < 1:
        raise TilebeamError(f"Repetitions must be at least 1, not {repetitions}.")
    runners = {name: Runner(lm) for name, lm in models.items()}
    for runner in runners.values():
        runner.check(case)
    costs: dict[str, list[Cost]] = {name: [] for name in runners}
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner.keeping())
        if warmup:
            for name, runner in runners.items():
                runner.warm_up(case)
                if on_run:
                    on_run(name, None)
        for _ in range(repetitions):
            for name, runner in runners.items():
                costs[name].append(runner.run(case))
                if on_run:
                    on_run(name, costs[name][-1].seconds)
    return costs
