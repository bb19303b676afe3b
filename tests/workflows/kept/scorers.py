"""Scorers that mean harm."""

import os
import sys
import time


def length(prompt, text):
    return float(len(text))


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
