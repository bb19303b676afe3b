"""The `astraflow` command: a file per subject.

Commands import what they need when they run, so that `--help` answers at once.
"""
