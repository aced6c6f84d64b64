"""Other engines' programs that guess tokens ahead, measured beside bench/speculation.py with the same prompts:
llama-lookup, llama-speculative and llama-speculative-simple of llama.cpp, llama-spec-bench of ik_llama.cpp."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_DECODED = re.compile(r"decoded +(\d+) tokens in +([0-9.]+) seconds")
_USUAL = ("-b", 512, "-ub", 512, "-ngl", 0, "-fa", "on", "--temp", 0)
_USUAL_IK = ("-b", 512, "-ub", 512, "-ngl", 0, "-fa", "on", "--temp", 0)


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
        """From "PROGRAM [OPTIONS]", as a shell reads it."""
        program, *arguments = shlex.split(text)
        return cls(Path(program), tuple(arguments))

    @property
    def name(self) -> str:
        """In reports."""
        return " ".join([self.program.name, *self.arguments])

    @property
    def of_ik(self) -> bool:
        """Whether it is llama-spec-bench, which wraps prompts in the chat template itself and reports in JSON."""
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
        command += [*_USUAL_IK, "--output-format", "jsonl"] if self.of_ik else [*_USUAL, "--no-escape"]
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
        types = [b for a, b in pairwise(self.arguments) if a == "--spec-type"]
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
