"""`gguf-repack`: the commands of :mod:`tilebeam.gguf.cli`, and what `--calibrate` needs to run a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.gguf import cli
from tilebeam.gguf.byte_bar import Shown
from tilebeam.gguf.calibration import Calibration
from tilebeam.gguf.errors import GGUFError


def calibration(
    model: Path, text: Path, ctx_size: int, chunks: int, threads: int | None, memory: int, show: Shown | None
) -> Calibration:
    """See :func:`tilebeam.measure.moments.calibration_of`; errors are the file tools' own."""
    from tilebeam.measure.moments import calibration_of
    from tilebeam.model.load_options import default_threads
    from tilebeam.text_files import read_corpus

    made = calibration_of(
        model,
        read_corpus(text),
        ctx_size=ctx_size,
        chunks=chunks,
        threads=threads or default_threads(),
        memory=memory,
        show=show,
    )

    def moments(names: Sequence[str]) -> Mapping[str, Any]:
        try:
            return made.moments(names)
        except TilebeamError as error:
            raise GGUFError(str(error)) from error

    return replace(made, moments=moments)


def main() -> None:
    """Run the console script."""
    cli.main(calibration)


if __name__ == "__main__":
    main()
