"""A server of OpenEnv, for the interpreter that has it: `openenv_server.py`; prints its port.

A word is to be said backwards; the seed decides which.
"""

import asyncio
import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WORDS = ("stop", "live", "drawer")


class Said(Action):
    word: str
    tone: str = "loud"


class Heard(Observation):
    text: str


class Backwards(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.word = options.get("word", WORDS[(seed or 0) % len(WORDS)])
        return Heard(text=f"Say {self.word} backwards.")

    def step(self, action, timeout_s=None, **options):
        is_right = action.word == self.word[::-1] and action.tone == "soft"
        return Heard(text="Yes." if is_right else "No.", reward=float(is_right), done=is_right)

    @property
    def state(self):
        return State()


async def main():
    app = create_fastapi_app(Backwards, Said, Heard, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve(sockets=[listening])


asyncio.run(main())
