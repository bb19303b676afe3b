"""The `astraflow` command: one small file per command or group.

Commands import what they need when they run, so that `--help` answers at once.
"""
