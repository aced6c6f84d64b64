"""``python -m tilebeam``, and the console script: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback while its modules are imported, too."""
    try:
        from tilebeam.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
