"""`python -m astraflow` is the `astraflow` command."""

from astraflow.cli.main import main

main()
