"""llama-batched-bench of another build of llama.cpp, ik_llama.cpp's for one, measured beside both sides of a round."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilebeam.measure.throughput import Case

_COLUMNS = 10  # PP TG B N_KV T_PP S_PP T_TG S_TG T S


@dataclass(frozen=True)
class BatchedBench:
    """Another engine's program.

    Attributes:
        program: llama-batched-bench.
        arguments: more options for it, such as ik_llama.cpp's -rtr (repack weights while loading).
    """

    program: Path
    arguments: tuple[str, ...] = ()

    def seconds(self, model: Path, case: Case, threads: int) -> float:
        """One run: of a case with a prompt, the time of that; else of its decoding, at a depth of at least one token.

        Raises:
            RuntimeError: the program failed, or printed no table.
        """
        prompt = case.n_prompt or max(case.n_depth, 1)
        return self.phases(model, prompt, case.n_gen or 1, case.n_parallel, threads)[0 if case.n_prompt else 1]

    def phases(
        self, model: Path, n_prompt: int, n_gen: int, n_parallel: int, threads: int, *, shared: bool = False
    ) -> tuple[float, float]:
        """One run: seconds of the prompts (shared: of the one that all sequences have) and of decoding behind them.

        Raises:
            RuntimeError: the program failed, or printed no table.
        """
        counts = ("-npp", n_prompt, "-ntg", n_gen, "-npl", n_parallel, *(("-pps",) if shared else ()))
        room = n_parallel * (n_prompt + n_gen)
        usual = ("-c", room + 32, "-b", 512, "-ub", 512, "-ngl", 0, "-fa", "on", "-t", threads, "-tb", threads)
        command = [self.program.resolve(), "-m", model.resolve(), *counts, *usual, *self.arguments]
        with tempfile.TemporaryDirectory() as folder:  # ik_llama.cpp's leaves a log where it runs
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
        printed = (done.stdout + "\n" + done.stderr).splitlines()  # ik_llama.cpp's table goes to standard error
        rows = [line.strip("| ").split("|") for line in printed if line.startswith("|")]
        measured = [row for row in rows if len(row) == _COLUMNS and row[0].strip().isdigit()]
        if done.returncode != 0 or len(measured) != 1:
            tail = " ".join(done.stderr.split()[-40:])
            raise RuntimeError(f"{self.program} ended with status {done.returncode} and no line of figures: {tail}")
        return float(measured[0][4]), float(measured[0][6])
