"""Command lines of the benches: options that many have, under one name and with one meaning."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilebeam.cli.bench import numbers

from bench.lib import limits


class Parser(argparse.ArgumentParser):
    """A bench's options, --json and --quick among them.

    Args:
        doc: the script's own text, which is its help.
        quick: what --quick makes smaller.
    """

    def __init__(self, doc: str | None, quick: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._counts: dict[str, tuple[int, int]] = {}
        self.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        self.add_argument("--quick", action="store_true", help=quick)

    def add_model(self, what: str = "GGUF file", default: str = "a random model") -> None:
        self.add_argument("-m", "--model", type=Path, help=f"{what} (default: {default})")

    def add_threads(self) -> None:
        cpus = limits.machine()["cpus"]
        self.add_argument("-t", "--threads", type=int, default=cpus, help="default: one for each CPU")

    def add_thread_counts(self) -> None:
        """-t of a bench that takes several numbers of threads, which `thread_counts` reads."""
        self.add_argument("-t", "--threads", help="default 1 and all; with --quick all")

    def thread_counts(self, args: Any) -> list[int]:
        if args.threads:
            return numbers(args.threads, "-t")
        cpus = int(limits.machine()["cpus"])
        return [cpus] if args.quick else sorted({1, cpus})

    def add_count(self, *names: str, usual: int, quick: int, what: str) -> None:
        help = f"{what} (default {usual}, {quick} with --quick)"
        self._counts[self.add_argument(*names, type=int, metavar="N", help=help).dest] = usual, quick

    def add_rounds(self, usual: int, quick: int) -> None:
        self.add_count("-r", "--rounds", usual=usual, quick=quick, what="rounds")

    def parse(self, argv: Sequence[str] | None = None) -> Any:
        """Return the arguments, with the numbers of `add_count` that were not given."""
        args = self.parse_args(argv)
        for name, (usual, quick) in self._counts.items():
            if getattr(args, name) is None:
                setattr(args, name, quick if args.quick else usual)
        return args
