"""Compare agents that stream over HTTP with the native workflow, on one engine, in turns.

64 sessions at once, one chat each, on a model of more than 100 M parameters; the agents are a
process of their own. Bar: 0.85 x the native tokens per second. The CPU seconds of the node are
told too: on a machine that others use, they say more than the clock.

    python benchmarks/agents.py --json agents.json
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from agent_episode import episode_of
from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.tokenizer import load_tokenizer
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from embedded_engine import MODELS
from verdict import conclude

CLIENT = Path(__file__).parent / "agent_ends" / "client.py"
POLICY = PolicyId("policy")
BAR = 0.85
PROMPT_TOKENS = 4


def write_model(folder: Path) -> int:
    """Write a model with random weights and a tokenizer of its size; return its parameters."""
    shape = MODELS["100m"]
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    words = {f"w{number} ": number for number in range(shape["vocab_size"])}
    made: Any = tokenizers.Tokenizer(models.WordLevel(vocab=words))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"w\d+ "), "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return sum(parameter.numel() for parameter in model.parameters())


class Bench:
    """One engine and the episodes of a round."""

    def __init__(self, engine: EmbeddedEngine, folder: Path, *, sessions: int, tokens: int) -> None:
        self.engine = engine
        self.tokenizer = load_tokenizer(folder)
        self.sessions = sessions
        self.tokens = tokens
        self.prompts = [
            "".join(f"w{3 + (number * 977 + word * 31) % 60_000} " for word in range(PROMPT_TOKENS))
            for number in range(sessions)
        ]

    def episode(self, index: int, door: AgentEndpoint | None = None) -> Episode:
        """Return an episode of its own seed."""
        sampling = SamplingParams(max_new_tokens=self.tokens, seed=index, ignore_eos=True)
        port = PolicyPort(
            policy_id=POLICY, engine=self.engine, tokenizer=self.tokenizer, sampling=sampling
        )
        return episode_of(port, door)

    async def native(self) -> dict[str, float]:
        """Run one round as a workflow does."""
        began, cpu = time.perf_counter(), time.process_time()

        async def one(index: int) -> int:
            talk = self.episode(index).trajectory()
            talk.observe(self.prompts[index])
            return len((await talk.sample()).tokens)

        counts = await asyncio.gather(*map(one, range(self.sessions)))
        return _told(sum(counts), time.perf_counter() - began, time.process_time() - cpu)

    async def streamed(
        self, endpoint: AgentEndpoint, client: asyncio.subprocess.Process
    ) -> dict[str, float]:
        """Run one round as agents do."""
        assert client.stdin is not None
        assert client.stdout is not None
        async with AsyncExitStack() as stack:
            urls: list[str] = []
            for index in range(self.sessions):
                session = AgentSession(self.episode(index, endpoint))
                urls.append((await stack.enter_async_context(endpoint.open(session))).base_url)
            cpu = time.process_time()
            asked = {"urls": urls, "prompts": self.prompts, "max_tokens": self.tokens}
            client.stdin.write(json.dumps(asked).encode() + b"\n")
            told = json.loads(await client.stdout.readline())
            made = _told(told["tokens"], told["seconds"], time.process_time() - cpu)
        return made | {"client_cpu_s": told["cpu_s"]}


def _told(tokens: int, seconds: float, cpu_s: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "cpu_s": cpu_s}


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Run both in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder)
        settings = EngineSettings(max_batch=asked.sessions, device="cpu", max_context=256)
        engine = EmbeddedEngine.from_directory(folder, settings, POLICY)
        await engine.load_directory(0)
        bench = Bench(engine, folder, sessions=asked.sessions, tokens=asked.tokens)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CLIENT)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**22,
    )
    endpoint = AgentEndpoint()
    native: list[dict[str, float]] = []
    streamed: list[dict[str, float]] = []
    try:
        await bench.native()
        for _ in range(asked.rounds):
            native.append(await bench.native())
            streamed.append(await bench.streamed(endpoint, client))
    finally:
        await endpoint.close()
        await engine.close()
        if client.stdin is not None:
            client.stdin.close()
        await client.wait()
    ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(native, streamed, strict=True)]
    cpu = [a["cpu_s"] / b["cpu_s"] for a, b in zip(native, streamed, strict=True)]
    return {
        "parameters": parameters,
        "sessions": asked.sessions,
        "bar": BAR,
        "ratio": statistics.median(ratios),
        "holds": statistics.median(ratios) >= BAR,
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu),
        "native": native,
        "streamed": streamed,
    }


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    report = asyncio.run(measure(asked))
    for name in ("native", "streamed"):
        rates = ", ".join(f"{one['tokens_per_s']:.0f}" for one in report[name])
        cpu = ", ".join(f"{one['cpu_s']:.1f}" for one in report[name])
        print(f"{name:9} {rates} tok/s; CPU of the node {cpu} s")
    print(f"ratio {report['ratio']:.2f} (bar {BAR}), by CPU {report['cpu_ratio']:.2f}")
    conclude(report, asked.json)


if __name__ == "__main__":
    main()
