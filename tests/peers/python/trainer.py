"""Our own trainer client, as a process of its own: `python trainer.py HUB TOKEN`."""

import sys

from astraflow.testing import train_counter

if __name__ == "__main__":
    hub, token = sys.argv[1:]
    train_counter(hub, token=token)
