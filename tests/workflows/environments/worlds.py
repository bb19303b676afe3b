"""Small environments, sound and otherwise, that tests run in processes of their own."""

import os
import random
import signal
import sys
import time

from astraflow.workflows.environments.protocol import Step


class Countdown:
    """Counts down from `start`; each right number pays its share."""

    def __init__(self, start=3):
        self.start = start

    def reset(self, task, seed):
        self.left = int(task.get("start", self.start))
        self.whole = self.left
        sys.stdout.write("what is printed is nobody's business")
        return f"from {self.left}"

    def step(self, action):
        if action != str(self.left):
            return Step(f"not {action}")
        self.left -= 1
        return Step("go on", 1 / self.whole, not self.left, {"left": self.left})

    def close(self):
        pass


class Dice(Countdown):
    """Says random numbers, by the global state of `random`."""

    def reset(self, task, seed):
        return str(random.randrange(10**6))

    def step(self, action):
        return Step(str(random.randrange(10**6)))


class Talk(Countdown):
    """Speaks in messages."""

    def reset(self, task, seed):
        return [{"role": "system", "content": "[s]"}, {"role": "user", "content": "[u]"}]

    def step(self, action):
        return Step([{"role": "user", "content": "[again]"}])


class Moody(Countdown):
    """Does what it is told to, whatever that breaks."""

    def step(self, action):
        match action:
            case "raise":
                raise RuntimeError("the dragon is tired")
            case "exit":
                sys.exit(3)
            case "die":
                sys.stderr.write("out of dragons")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "nan":
                return Step(reward=float("nan"))
            case "inf":
                return Step(metrics={"gold": float("inf")})
            case "none":
                return None
            case "object":
                return Step(observation=object())
            case "shout":
                return Step("x" * 17 * 2**20)
            case "complain":
                sys.stderr.write("x" * 40 * 2**20)
            case "number":
                return Step(observation=7)
        return super().step(action)


class NeverMade:
    def __init__(self):
        raise OSError("the dragon's lair is locked")


class GymGuess:
    """Has the methods of Gymnasium; in `numbers` its observations are no text."""

    def __init__(self, numbers=False):
        self.numbers = numbers

    def reset(self, *, seed=None, options=None):
        self.secret = (options or {}).get("secret", seed % 10)
        return (0 if self.numbers else "guess"), {"suffix": "Your guess?"}

    def step(self, action):
        is_right = action == str(self.secret)
        return "right" if is_right else "wrong", float(is_right), is_right, False, {"hot": is_right}
