"""Fuzz the agents' endpoint: whatever a body is, the answer is a whole one or a typed error.

    python benchmarks/agent_fuzz.py --count 100000 --json FILE

Requests of all APIs are sound ones with some faults (other types, NaN, huge numbers, deep nesting,
lone surrogates, cut or overwritten bytes), seeded, sent over sockets to a node's endpoint with the
embedded engine behind it. An answer is wrong that has a status of 500, or is none that its API
knows.
"""

import argparse
import asyncio
import copy
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
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
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from verdict import conclude

POLICY = PolicyId("policy")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}<assistant>"
)
# A session that holds thousands of turns is none that an agent has.
PER_SESSION = 250
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "add", "description": "Adds.", "parameters": _SCHEMA}
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
_CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "n": 1,
    "stop": ["\n", "x"],
    "seed": 3,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {},
}
_ASKED: dict[str, Any] = {"model": "m", "messages": _CHAT["messages"][:2], "max_tokens": 2}
_SHAPE = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
_TWO = [_CHAT["tools"][0], {"type": "function", "function": {**_FUNCTION, "name": "sub"}}]
_SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("v1/chat/completions", _CHAT),
    ("v1/chat/completions", {**_CHAT, "stream": False}),
    ("v1/chat/completions", {**_ASKED, "response_format": _SHAPE}),
    ("v1/chat/completions", {**_ASKED, "tools": _TWO, "tool_choice": "required"}),
    ("v1/completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "stop": "a", "n": 2}),
    ("v1/completions", {"prompt": [3, 4], "max_tokens": 2, "echo": False, "stream": True}),
    (
        "v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "function", "name": "add"},
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 2,
            "temperature": 1.0,
            "stream": False,
        },
    ),
    (
        "v1/responses",
        {
            "input": "hi",
            "tools": [
                {
                    "type": "namespace",
                    "name": "sums",
                    "description": "Sums.",
                    "tools": [{"type": "function", **_FUNCTION}],
                }
            ],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_output_tokens": 2,
            "stream": True,
        },
    ),
    (
        "v1/messages",
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
                },
            ],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 2,
            "stop_sequences": ["x"],
            "stream": False,
        },
    ),
    (
        "v1/messages/count_tokens",
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "go"}],
            "tools": [{"name": "add", "input_schema": _SCHEMA}],
        },
    ),
    ("reward", {"reward": 0.5, "parts": {"a": 1.0}, "metrics": {"b": 2.0}}),
]
_NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    -(10**30),
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "\ufffd" * 9,
    "9" * 5000,
    "required",
    "none",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "function", "function": None},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "(("}}},
    {"type": "json_object"},
    ["a"] * 200,
    list(range(300)),
]
_WAITS = ("abc", "nan", "inf", "-inf", "-1", "1e400", "", "0x10", "٣", "0", "0.0", "9" * 400)
_TYPED = frozenset((400, 401, 404, 408, 410, 413, 429, 503))


def write_model(folder: Path) -> None:
    """Write a small model with random weights that reads and writes bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(("<s>", "</s>", *letters))}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made: Any = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))


def faulty(dice: random.Random) -> tuple[str, bytes]:
    """Return a path and a body with none to four faults."""
    path, sound = dice.choice(_SEEDS)
    body = copy.deepcopy(sound)
    for _ in range(dice.randrange(5)):
        _spoil(dice, body)
    try:
        written = json.dumps(body).encode()
    except RecursionError:
        written = b"[" * 100_000
    if not dice.randrange(8):
        written = _overwritten(dice, written)
    return path, written


def _spoil(dice: random.Random, body: Any) -> None:
    """Change one place of a body, however deep."""
    while True:
        keys: list[Any] = list(body) if isinstance(body, dict) else list(range(len(body)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(body[key], dict | list) and body[key] and dice.randrange(3):
            body = body[key]
            continue
        break
    match dice.randrange(8):
        case 0:
            del body[key]
        case 1:
            body[key] = _deep(dice, body[key])
        case 2:
            body[key] = [body[key], body[key]]
        case _:
            body[key] = copy.deepcopy(dice.choice(_NASTY))


def _deep(dice: random.Random, value: Any) -> Any:
    for _ in range(dice.choice((1, 5, 150, 400))):
        value = dice.choice(([value], {"type": value}))
    return value


def _overwritten(dice: random.Random, body: bytes) -> bytes:
    at = dice.randrange(len(body) + 1)
    match dice.randrange(5):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([dice.randrange(256)]) + body[at + 1 :]
        case 2:
            return body[:at] + dice.choice((b"NaN", b"1e999", b'"\\ud800"', b"\xff")) + body[at:]
        case 3:
            return dice.choice((b"[", b'{"a":')) * dice.choice((10, 3000, 100_000))
        case _:
            return b'{"messages":' + b"[" * 9000 + b"]" * 9000 + b"}"


@dataclass(slots=True, kw_only=True)
class Fuzz:
    """What was answered.

    Attributes:
        statuses: How often each.
        wrong: Requests whose answers are none that an API knows: path, body, answer.
    """

    statuses: Counter[int]
    wrong: list[tuple[str, bytes, str]]

    def note(self, path: str, body: bytes, answer: httpx.Response) -> None:
        """Judge an answer."""
        self.statuses[answer.status_code] += 1
        if not _is_known(answer):
            self.wrong.append((path, body, f"{answer.status_code} {answer.text[:300]}"))


def _is_known(answer: httpx.Response) -> bool:
    if answer.status_code == httpx.codes.NO_CONTENT:
        return True
    if answer.headers["content-type"].startswith("text/event-stream"):
        said = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return bool(said) and all(isinstance(json.loads(each), dict) for each in said)
    try:
        error = answer.json().get("error")
    except ValueError:
        return False
    if answer.status_code == httpx.codes.OK:
        return not error
    return answer.status_code in _TYPED and isinstance(error, dict) and bool(error["message"])


async def fuzz(count: int, *, seed: int, company: int = 32) -> Fuzz:
    """Send that many requests, some at once."""
    found, dice = Fuzz(statuses=Counter(), wrong=[]), random.Random(seed)
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder)
        settings = EngineSettings(kind="embedded", max_batch=16, max_context=1024)
        engine = EmbeddedEngine.from_directory(folder, settings, POLICY)
        exits.push_async_callback(engine.close)
        await engine.load_directory(0)
        endpoint = AgentEndpoint()
        exits.push_async_callback(endpoint.close)
        http = await exits.enter_async_context(httpx.AsyncClient(timeout=60))
        for first in range(0, count, PER_SESSION):
            session = AgentSession(
                _episode(engine, folder, dice), chooses_sampling=dice.choice((False, True))
            )
            async with endpoint.open(session) as entrance:
                asked = [_asked(dice) for _ in range(min(PER_SESSION, count - first))]
                todo = iter(asked)
                base = entrance.session_url
                workers = [_ask(http, base, endpoint.token, todo, found) for _ in range(company)]
                await asyncio.gather(*workers)
    return found


async def _ask(http: httpx.AsyncClient, base: str, token: str, todo: Any, found: Fuzz) -> None:
    for path, body in todo:
        root = base.rpartition("/sessions")[0]
        if path.startswith("sessions"):
            bearer = {"Authorization": f"Bearer {token}"}
            answer = await http.post(f"{root}/{path}", headers=bearer)
        else:
            answer = await http.post(f"{base}/{path}", content=body)
        found.note(path, body, answer)


def _asked(dice: random.Random) -> tuple[str, bytes]:
    if not dice.randrange(40):
        wait = dice.choice(_WAITS)
        return f"sessions?wait_s={quote(wait)}&lane=none", b""
    return faulty(dice)


def _episode(engine: EmbeddedEngine, folder: Path, dice: random.Random) -> Episode:
    sampling = SamplingParams(max_new_tokens=3, seed=dice.randrange(2**31))
    port = PolicyPort(
        policy_id=POLICY,
        engine=engine,
        tokenizer=load_tokenizer(folder),
        sampling=sampling,
        template=ChatTemplate(TEMPLATE),
        is_trained=bool(dice.randrange(2)),
    )
    return episode_of(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(fuzz(args.count, seed=args.seed))
    for path, body, answer in found.wrong[:20]:
        print(path, body[:600], answer, sep="\n  ")
    told = {
        "count": sum(found.statuses.values()),
        "wrong": len(found.wrong),
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))
    conclude(told | {"holds": not found.wrong}, args.json)


if __name__ == "__main__":
    main()
