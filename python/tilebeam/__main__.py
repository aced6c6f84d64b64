"""The command line: `tilebeam`, and ``python -m tilebeam``."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it is still being imported is no traceback."""
    try:
        from tilebeam.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
