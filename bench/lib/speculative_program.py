"""What else guesses tokens ahead, measured beside bench/speculation.py with the same prompts: llama-lookup,
llama-speculative and llama-speculative-simple of llama.cpp, llama-spec-bench of ik_llama.cpp, and `llama_cpp.Llama`."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

_DECODED = re.compile(r"decoded +(\d+) tokens in +([0-9.]+) seconds")
_USUAL = ("-b", 512, "-ub", 512, "-ngl", 0, "-fa", "on", "--temp", 0)


@dataclass(frozen=True)
class SpeculativeProgram:
    """One of them.

    Attributes:
        program: its path.
        arguments: more options for it, such as --spec-type ngram-cache.
    """

    program: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SpeculativeProgram:
        program, *arguments = shlex.split(text)
        return cls(Path(program), tuple(arguments))

    @property
    def name(self) -> str:
        return " ".join([self.program.name, *self.arguments])

    @property
    def of_ik(self) -> bool:
        """Return whether it is llama-spec-bench, which applies the chat template itself and reports in JSON."""
        return "spec-bench" in self.program.name

    def run(self, model: Path, draft: Path | None, prompt: str, n: int, threads: int, n_ctx: int) -> tuple[int, float]:
        """Tokens generated for one prompt, and the seconds without the prompt's.

        Args:
            prompt: in the chat template, unless `of_ik`.
            draft: for programs that use a draft model: not llama-lookup, nor one that is given another --spec-type.

        Raises:
            RuntimeError: the program failed, or printed no figures.
        """
        command: list[object] = [self.program, "-m", model, "-n", n, "-c", n_ctx, "-t", threads, "-tb", threads]
        command += self._drafting(draft)
        command += [*_USUAL, "--output-format", "jsonl"] if self.of_ik else [*_USUAL, "--no-escape"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(prompt)
            file.flush()
            command += ["-f", file.name, *self.arguments]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
        found = self._figures(done.stdout, done.stderr) if done.returncode == 0 else None
        if found is None:
            tail = " ".join(done.stderr.split()[-40:])
            raise RuntimeError(f"{self.program} ended with status {done.returncode} and no figures: {tail}")
        return found

    def _drafting(self, draft: Path | None) -> list[object]:
        types = [b for a, b in itertools.pairwise(self.arguments) if a == "--spec-type"]
        if draft is None or "lookup" in self.program.name or not all("draft" in t for t in types):
            return []
        wanted = "simple" in self.program.name and not types
        return ["-md", draft, *(["--spec-type", "draft-simple"] if wanted else [])]

    def _figures(self, stdout: str, stderr: str) -> tuple[int, float] | None:
        if not self.of_ik:
            match = _DECODED.search(stdout + stderr)
            return (int(match[1]), float(match[2])) if match else None
        rows = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
        for row in rows:
            if row.get("row_type") == "summary" and row.get("successes"):
                return int(row["generated"]), float(row["decode_s"])
        return None


class LlamaLookup:
    """`llama_cpp.Llama` with its own guesses, which programs keep after `tilebeam.register()`.

    With a draft model `Llama` computes and copies the logits of every position that it decodes, the prompt's too.

    Args:
        guesses: num_pred_tokens at each step; 0: without guesses.
        layers: n_gpu_layers; 0 is the stock backend.
    """

    def __init__(self, path: Path, n_ctx: int, threads: int, guesses: int, layers: int) -> None:
        self.name = f"{'' if layers else 'stock '}Llama, {guesses} guesses"
        draft = LlamaPromptLookupDecoding(num_pred_tokens=guesses) if guesses else None
        self._llm = llama_cpp.Llama(
            str(path),
            n_ctx=n_ctx,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=layers,
            flash_attn=True,
            draft_model=draft,
            logits_all=draft is not None,  # with a draft model alone, llama-cpp-python keeps logits of n_batch tokens
            verbose=False,
        )
        self.close = self._llm.close

    def run(self, prompt: list[int], n: int) -> tuple[int, float]:
        """Tokens of a greedy text, and the seconds without the prompt's."""
        next(self._llm.generate(prompt, temp=0))  # its tokens are in the cache now, up to the last
        started = time.perf_counter()
        tokens = list(itertools.islice(self._llm.generate(prompt, temp=0), n))
        took = time.perf_counter() - started
        time.sleep(0.2)  # the stock backend's threads spin for a while after a run
        return len(tokens), took
