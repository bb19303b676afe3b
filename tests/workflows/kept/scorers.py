"""Scorers that mean harm."""

import os
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
    return 1.0
