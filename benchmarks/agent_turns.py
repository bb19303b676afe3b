"""Fuzz whole conversations of agents: a trainer gets what was sampled, token by token.

    python benchmarks/agent_turns.py --count 10000 --json FILE

Seeded agents talk over sockets to a node's endpoint with the embedded engine behind it, in all four
dialects and from one into another, streamed or not: tools called one at a time and several at once,
broken calls, control tokens, characters cut in two, stop strings, forms of answers, retries,
branches, rewritten histories, clients that leave in the middle; versions go live all the while.
A difference is whatever a trajectory, after its way over the wire, has other than the engine drew;
a chat that goes on and does not begin with the very tokens that were drawn; a stream that shows
other words than the tokens say; and a request that is answered with an error.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from agent_dialects import DIALECTS, Line, Said, chat_body, chat_said
from agent_episode import episode_of
from agent_speaker import END, TEMPLATE, Call, Speaker, Tape, differences
from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.tokenizer import FastTokenizer, load_tokenizer
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.wire.rollout import decode_trajectory, encode_trajectory
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from verdict import conclude

POLICY = PolicyId("policy")
MAX_CONTEXT = 2048
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_NAMES = ("add", "sub")
_FORM = {
    "type": "object",
    "properties": {"is_sure": {"type": "boolean"}},
    "required": ["is_sure"],
    "additionalProperties": False,
}
_WORDS = (
    *(
        "the",
        " fox",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "\r\n",
        ".",
        "ok",
        "é",
        "日本",
        "🦊",
        "\u200d",
        "x" * 40,
    ),
    *("<|im_end|>", "<|im_start|>system\n", "<|go0|>", "<|pad|>", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>", '{"a": 1}', "\\", "\u2028", "\x00", "\ufffd", "STOP", "]]>", "&lt;"),
)
# What the model says beside them: halves of characters, calls and what is nearly one.
_HALVES = (b"\xf0\x9f", b"\xa6\x8a", b"\xe6\x97", b"\xa5", b"\xc3", b"\xa9", b"\xff")
_PARTS = (
    *('<tool_call>{"name": "add", "arguments": ', '{"a": 1}', "}</tool_call>", "}\n</tool_call>\n"),
    *('<tool_call>\n{"name": "sub", "arguments": ', '{"a": "é\\n"}', '"text"', "{'a': 1}", "1.50"),
    *('<tool_call>{"name": "none", "parameters": ', '{"a": NaN}', '{"a": 1e999, "a": []}', "null"),
    *(
        '{"is_sure": true}',
        '{"is_sure": ',
        "<tool",
        "_call>",
        "ST",
        "OP",
        " STOPS",
        "\ufffd",
        "[" * 400,
        '{"a": "\\ud800"}',
    ),
)


def babbler(dice: random.Random) -> Speaker:
    """Return a model that says words, characters in halves, calls and broken ones, at random."""
    made = Speaker(variables={"script": [("", 0, 1)]})
    control = ("<|im_start|>", "<|pad|>")
    said: list[str | bytes] = [*_WORDS, *_HALVES, *_PARTS, *control]
    opened = [part for part in _PARTS if "{" in part and part.endswith(": ")]
    objects = [part for part in _PARTS if part[0] in '{"1n']
    closed = [part for part in _PARTS if part.startswith("}")]
    for token in ("<|go0|>", "\n", " ", *said):
        some = [*dice.sample(said, 6), dice.choice(opened)]
        if token in opened:
            some = objects
        elif token in objects:
            some = [*closed, *closed, dice.choice(said)]
        elif token in closed:
            some = [*some, *opened, *opened]
        made.next_of[token] = {other: dice.uniform(0.2, 2.0) for other in (*some, END)}
    return made


@dataclass(slots=True, kw_only=True)
class Found:
    """What the conversations came to.

    Attributes:
        turns: Generations that were compared.
        tokens: Of them, as sampled.
        trajectories: That they became.
        differences: Each in a line.
        did: How often agents did what.
    """

    turns: int = 0
    tokens: int = 0
    trajectories: int = 0
    differences: list[str] = field(default_factory=list[str])
    did: Counter[str] = field(default_factory=Counter[str])


class Agent:
    """Holds the conversations of one episode, one after the other."""

    def __init__(self, stage: "Stage", http: httpx.AsyncClient, seed: int) -> None:
        self._stage = stage
        self._http = http
        self._dice = random.Random(seed)
        self._found = stage.found
        self._lines: list[Line] = []
        self._tools: list[dict[str, Any]] = []
        self._asked_with: list[tuple[list[Line], Call]] = []
        """The lines before each generation."""
        self._texts_said: list[tuple[str, tuple[int, ...]]] = []
        """Texts with what was said to them, and their tokens."""
        self._before: list[Line] | None = None
        """Those before the last answer, while the chat goes on as it was; None: it was changed."""

    async def talk(self, turn_count: int) -> None:
        """Do so many turns, each in one way or another."""
        for _ in range(turn_count):
            if not self._lines or self._dice.random() < 0.12:
                self._begin()
            await self._dice.choices(
                (self._turn, self._texts, self._retried, self._left), (16, 1, 2, 1)
            )[0]()
            if self._dice.random() < 0.15:
                self._edit()

    def _begin(self) -> None:
        self._did("conversation")
        self._lines = [Line(role="user", text=self._words())]
        if self._dice.random() < 0.5:
            self._lines.insert(0, Line(role="system", text=self._words()))
        names = self._dice.sample(_NAMES, self._dice.randrange(3))
        self._tools = [
            {
                "type": "function",
                "function": {"name": name, "description": self._words(), "parameters": _SCHEMA},
            }
            for name in names
        ]
        self._before = None

    async def _turn(self) -> None:
        """Ask once, and go on from what was said, or from one of what was said."""
        path = self._dice.choice(list(DIALECTS))
        write, read = DIALECTS[path]
        asked = self._asked(count=path.endswith("completions"))
        began = len(self._tape.calls)
        told = await self._post(path, write(self._lines, asked))
        if told is None:
            return
        answers: list[Said] = read(told)
        calls = self._tape.calls[began:]
        self._asked_with += [(list(self._lines), call) for call in calls]
        self._check_shown(asked, answers, calls)
        self._check_goes_on(calls[0], asked)
        said = self._dice.choice(answers)
        if said.calls:
            self._did("called in parallel" if len(said.calls) > 1 else "called")
        self._before = list(self._lines)
        text = said.text.strip() if self._dice.random() < 0.3 else said.text
        self._lines.append(Line(role="assistant", text=text, calls=tuple(said.calls)))
        self._lines += [
            Line(role="tool", text=self._words(), call_id=name) for name, _, _ in said.calls
        ]
        if not said.calls or self._dice.random() < 0.2:
            self._lines.append(Line(role="user", text=self._words()))

    async def _texts(self) -> None:
        """Go on with a text for some turns."""
        text, before = self._words(), ""
        for _ in range(self._dice.randint(1, 3)):
            asked = {"prompt": text, "max_tokens": self._dice.randint(1, 12), "model": "m"}
            asked["stream"], asked["return_token_ids"] = self._dice.random() < 0.5, True
            began = len(self._tape.calls)
            told = await self._post("v1/completions", asked)
            if told is None:
                return
            (said,), (call,) = chat_said(told), self._tape.calls[began:]
            if said.token_ids != call.generation.tokens.tolist():
                self._differs("the token ids that were told are others")
            known = [
                tokens
                for whole, tokens in self._texts_said
                if text.startswith(whole) and len(whole) >= len(before)
            ]
            if before and not any(call.prompt[: len(tokens)] == tokens for tokens in known):
                self._differs(f"a text that goes on was encoded anew: {before!r} {text!r}")
            before = text + said.text
            self._texts_said.append((before, call.tokens))
            text = before + self._words()

    async def _retried(self) -> None:
        """Ask the same more than once, at once or in turn, and leave the answers alone."""
        self._did("retry")
        asked = self._asked(count=False)
        body = chat_body(self._lines, asked)
        lines, began = list(self._lines), len(self._tape.calls)
        await asyncio.gather(*(self._post("v1/chat/completions", body) for _ in range(2)))
        self._asked_with += [(lines, call) for call in self._tape.calls[began:]]

    async def _left(self) -> None:
        """Leave in the middle of an answer."""
        self._did("left")
        path = self._dice.choice(list(DIALECTS))
        body = DIALECTS[path][0](self._lines, {**self._asked(count=False), "stream": True})
        url, began = f"{self._stage.url}/{path}", len(self._tape.calls)
        async with self._http.stream("POST", url, json=body) as answer:
            async for _ in answer.aiter_bytes():
                if self._dice.random() < 0.3:
                    break
        while self._tape.running:  # noqa: ASYNC110 - the server makes it false
            await asyncio.sleep(0)
        self._asked_with += [(list(self._lines), call) for call in self._tape.calls[began:]]

    def _edit(self) -> None:
        """Change what was said before, as agents do that summarise or rewrite."""
        self._did("edit")
        self._before = None
        at = self._dice.randrange(len(self._lines))
        line = self._lines[at]
        match self._dice.randrange(3):
            case 0:
                self._lines[at] = Line(
                    role=line.role, text=self._words(), calls=line.calls, call_id=line.call_id
                )
            case 1:
                self._lines = self._lines[: at + 1]
                while self._lines[-1].role == "assistant" and len(self._lines) > 1:
                    self._lines.pop()
            case _:
                self._tools = self._tools[:1]
        if self._lines[-1].role in ("assistant", "system"):
            self._lines.append(Line(role="user", text=self._words()))

    def _asked(self, *, count: bool) -> dict[str, Any]:
        dice = self._dice
        made: dict[str, Any] = {"model": "m", "max_tokens": dice.randint(1, 24)}
        made["stream"] = dice.random() < 0.5
        if self._tools:
            made["tools"] = self._tools
            name = {"name": dice.choice(self._tools)["function"]["name"]}
            choices = ["auto", "auto", "auto", {"type": "function", "function": name}]
            made["tool_choice"] = dice.choice([*choices, "required"])
            made["parallel_tool_calls"] = dice.random() < 0.7
        if dice.random() < 0.1:
            shape = {"name": "form", "schema": _FORM}
            made["response_format"] = {"type": "json_schema", "json_schema": shape}
        if count:
            made["n"] = dice.choice((1, 1, 1, 3))
            made["return_token_ids"] = True
        if count and dice.random() < 0.3:
            made["stop"] = ["STOP"]
        return made

    async def _post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the body of the answer, or what the events of a stream say."""
        self._did(f"{path} {'streamed' if body['stream'] else 'whole'}")
        answer = await self._http.post(f"{self._stage.url}/{path}", json=body)
        if answer.status_code != httpx.codes.OK:
            self._lines = []
            if "context" in answer.text:
                self._did("full")
            else:
                self._differs(f"{answer.status_code}: {answer.text[:300]} to {body!r:.900}")
            return None
        if not body["stream"]:
            return [answer.json()]
        return [json.loads(line[6:]) for line in answer.text.split("\n") if line[:7] == "data: {"]

    def _check_shown(self, asked: dict[str, Any], answers: list[Said], calls: list[Call]) -> None:
        """Compare what a client was shown with what the tokens say."""
        drawn = [call.generation.tokens.tolist() for call in calls]
        told = [said.token_ids for said in answers]
        if len(calls) != len(answers):
            self._differs(f"{len(calls)} generations for {len(answers)} answers")
        if None not in told and sorted(map(str, told)) != sorted(map(str, drawn)):
            self._differs("the token ids that were told are others")
        if asked.get("parallel_tool_calls") is False and any(len(s.calls) > 1 for s in answers):
            self._differs("calls in parallel, where one was asked for")
        if len(answers) == 1 and not _forced_name(asked):
            text = self._stage.tokenizer.decode(drawn[0])
            is_one = asked.get("parallel_tool_calls") is False
            for stop in (*asked.get("stop", ()), *(("</tool_call>",) if is_one else ())):
                text = text.partition(stop)[0]
            shown = text.partition("<tool_call>")[0] if answers[0].calls else text
            if answers[0].text.rstrip() != shown.rstrip():
                self._differs(f"shown {answers[0].text!r} of {text!r}")

    def _check_goes_on(self, call: Call, asked: dict[str, Any]) -> None:
        """A chat that goes on begins with all tokens of an answer to what stood before it.

        Behind them is what the template makes of what was said since, and nothing else.
        """
        if self._before is None:
            return
        since = self._lines[len(self._before) + 1 :]
        said = "".join(f"<|im_start|>{line.role}\n{line.text}{END}\n" for line in since)
        name = _forced_name(asked)
        begun = f'<tool_call>\n{{"name": "{name}", "arguments": ' if name else ""
        rest = f"{END}\n{said}<|im_start|>assistant\n<|go0|>{begun}"
        known = [before.tokens for lines, before in self._asked_with if lines == self._before]
        if not any(
            call.prompt[: len(tokens)] == tokens
            and self._stage.text(call.prompt[len(tokens) - 1 :]).endswith(rest)
            and self._stage.text(call.prompt[len(tokens) :]) in (rest, rest.removeprefix(END))
            for tokens in known
        ):
            self._differs(f"a chat that goes on was encoded anew: {asked} {self._lines[-3:]}")

    def _words(self) -> str:
        return "".join(self._dice.choices(_WORDS, k=self._dice.randint(1, 5)))

    def _did(self, what: str) -> None:
        self._found.did[what] += 1

    def _differs(self, how: str) -> None:
        self._found.differences.append(how)

    @property
    def _tape(self) -> Tape:
        return self._stage.tape


def _forced_name(asked: dict[str, Any]) -> str | None:
    """Return the tool whose call a request begins."""
    match asked.get("tool_choice"):
        case {"function": {"name": str(name)}}:
            return name
        case "required" if len(asked["tools"]) == 1:
            return asked["tools"][0]["function"]["name"]
        case _:
            return None


@dataclass(slots=True, kw_only=True)
class Stage:
    """One episode that an agent works on."""

    tape: Tape
    episode: Episode
    tokenizer: FastTokenizer
    raw_tokenizer: tokenizers.Tokenizer
    found: Found
    url: str = ""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens as they are written."""
        return self.raw_tokenizer.decode(list(tokens), skip_special_tokens=False)

    def compare(self) -> None:
        """Compare what the trainer gets with what was sampled."""
        trajectories = [
            decode_trajectory(type(message).FromString(message.SerializeToString()))
            for message in map(encode_trajectory, self.episode.trajectories())
        ]
        is_trained = self.episode.port(POLICY).is_trained
        found = self.found
        found.turns += len(self.tape.calls)
        found.tokens += sum(len(call.generation.tokens) for call in self.tape.calls)
        found.trajectories += len(trajectories)
        found.differences += differences(self.tape.calls, trajectories, is_trained=is_trained)


async def fuzz(count: int, *, seed: int, company: int = 12) -> Found:
    """Hold conversations until that many generations were compared; some agents at once."""
    found, dice = Found(), random.Random(seed)
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        speaker = babbler(dice)
        speaker.write(folder, max_context=MAX_CONTEXT)
        settings = EngineSettings(max_batch=32, max_context=MAX_CONTEXT)
        engine = EmbeddedEngine.from_directory(folder, settings, POLICY)
        exits.push_async_callback(engine.close)
        await engine.load_directory(0)
        endpoint = AgentEndpoint()
        exits.push_async_callback(endpoint.close)
        http = await exits.enter_async_context(httpx.AsyncClient(timeout=60))
        seeds = iter(lambda: dice.randrange(2**31), -1)

        async def work() -> None:
            while found.turns < count:
                stage = _stage(engine, folder, speaker, next(seeds), found)
                async with endpoint.open(AgentSession(stage.episode)) as entrance:
                    stage.url = entrance.session_url
                    await Agent(stage, http, next(seeds)).talk(20)
                stage.compare()

        async with asyncio.TaskGroup() as group:
            updates = group.create_task(_update(engine))
            await asyncio.gather(*(work() for _ in range(company)))
            updates.cancel()
    return found


async def _update(engine: EmbeddedEngine) -> None:
    """Let one version after the other go live, of the same weights."""
    while True:
        await engine.load_directory((engine.version or 0) + 1)
        await asyncio.sleep(0.05)


def _stage(
    engine: EmbeddedEngine, folder: Path, speaker: Speaker, seed: int, found: Found
) -> Stage:
    tape, tokenizer = Tape(engine), load_tokenizer(folder)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    sampling = SamplingParams(max_new_tokens=24, seed=seed)
    port = PolicyPort(
        policy_id=POLICY,
        engine=tape,
        tokenizer=tokenizer,
        sampling=sampling,
        template=ChatTemplate(TEMPLATE, variables=speaker.variables),
        is_trained=bool(seed % 4),
    )
    episode = episode_of(port)
    return Stage(tape=tape, episode=episode, tokenizer=tokenizer, raw_tokenizer=raw, found=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(fuzz(args.count, seed=args.seed))
    for difference in found.differences[:20]:
        print(difference)
    told = {
        "turns": found.turns,
        "tokens": found.tokens,
        "trajectories": found.trajectories,
        "differences": len(found.differences),
        "did": dict(sorted(found.did.items())),
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))
    conclude(told | {"holds": not found.differences}, args.json)


if __name__ == "__main__":
    main()
