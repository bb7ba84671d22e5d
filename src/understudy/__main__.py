"""Run the command line with ``python -m understudy``."""

from understudy.cli import main

main()
