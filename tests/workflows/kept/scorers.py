"""Scorers that mean harm."""

import importlib
import os
import sys
import time
from pathlib import Path


def length(prompt, text):
    return float(len(text))


def threads(prompt, text):
    """Say how many this process has once numpy is loaded; 0: it was told a secret of the run."""
    importlib.import_module("numpy")
    is_told = any(name.startswith("ASTRAFLOW_") for name in os.environ)
    return 0.0 if is_told else float(len(list(Path("/proc/self/task").iterdir())))


def hostile(prompt, text):
    match text:
        case "loop":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "memory":
            return len(bytearray(16 * 2**30))
        case "sleep":
            time.sleep(600)
        case "raise":
            raise ValueError("no such unit")
        case "sys.exit":
            sys.exit("done")
    return 1.0


def run(prompt, text):
    """Run the text, as a scorer of programs does."""
    exec(text, {})
    return 1.0
