"""What chats of several turns take when a turn goes on from the last one, against reading it anew.

    python benchmarks/chat_turns.py --model path/to/model --json chat_turns.json

Chats begin with a prompt; then, turn by turn, the model samples and hears an observation. Anew is
the same with another first token at every turn, so that nothing was read before. Both ways take
turns in one process, on one engine; told is the least time of each.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine


async def play(engine: EmbeddedEngine, given: argparse.Namespace, seed: int, *, anew: bool) -> int:
    """Play all chats to their end; return how many tokens were sampled."""
    chance = np.random.default_rng(seed)
    chats = chance.integers(3, 1000, (given.chats, given.prompt)).tolist()
    knobs = SamplingParams(max_new_tokens=given.completion, seed=seed, ignore_eos=True)
    count = 0

    async def one(chat: list[int]) -> None:
        nonlocal count
        for turn in range(given.turns):
            chat[0] = 3 + (1 + turn) * anew
            said = await engine.generate(chat, knobs)
            count += len(said.tokens)
            chat += said.tokens.tolist()
            chat += [int(each) for each in np.arange(given.observation) + 3 + turn]

    await asyncio.gather(*map(one, chats))
    return count


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Let both ways take turns; return the least time of each."""
    settings = EngineSettings(device="cpu", max_batch=given.chats, thread_count=given.threads)
    engine = EmbeddedEngine.from_directory(given.model, settings, PolicyId("solver"))
    found: dict[str, Any] = {}
    try:
        await engine.load_directory(0)
        await play(engine, given, 0, anew=True)
        for seed in range(given.rounds):
            for way in ("goes on", "anew"):
                start = time.perf_counter()
                count = await play(engine, given, 1 + seed, anew=way == "anew")
                took = time.perf_counter() - start
                found[way] = {
                    "tokens": count,
                    "wall_s": min(took, found.get(way, {}).get("wall_s", took)),
                }
    finally:
        await engine.close()
    return {**found, "ratio": round(found["anew"]["wall_s"] / found["goes on"]["wall_s"], 2)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--completion", type=int, default=8, help="tokens of a turn")
    parser.add_argument("--observation", type=int, default=25, help="tokens of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measure(given))
    for way in ("goes on", "anew"):
        print(f"{way:8} {found[way]['wall_s']:8.2f} s for {found[way]['tokens']} sampled tokens")
    print(f"anew / goes on {found['ratio']:.2f}")
    if given.json is not None:
        chosen = {name: value for name, value in vars(given).items() if name != "json"}
        told = {**found, "settings": {**chosen, "model": given.model.name}}
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
