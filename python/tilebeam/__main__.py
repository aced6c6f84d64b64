"""``python -m tilebeam``: the command line."""

from tilebeam.cli.main import main

main()
