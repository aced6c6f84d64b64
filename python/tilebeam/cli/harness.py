"""`tilebeam-lm-eval`: the command line of lm-evaluation-harness, with `tilebeam` among its models."""

from __future__ import annotations

import sys

from tilebeam.errors import TilebeamError


def main() -> None:
    """Run the console script; options are those of `lm_eval`."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import tilebeam.evaluation.harness  # noqa: F401 - registers the model
    except ImportError as error:
        sys.exit(f"Error: lm-evaluation-harness cannot be imported ({error}): pip install tilebeam[harness].")
    try:
        cli_evaluate()
    except TilebeamError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
