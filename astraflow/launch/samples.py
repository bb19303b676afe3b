"""Sampled rollouts of a run, for people to look at."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from astraflow.client.payloads import read_content
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.buckets import Bucket
from astraflow.wire.rollout import read_arrays


def find_rollouts(
    run_dir: RunDir,
    *,
    count: int,
    policy: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> list[dict[str, Any]]:
    """Return the newest `count` sampled rollouts that are wanted, oldest first; None: all are.

    Raises:
        AstraflowError: INVALID_FIELD when there is no such run.
    """

    def is_wanted(row: Mapping[str, Any]) -> bool:
        reward = row.get("reward")
        return (
            (policy is None or policy in row["versions"])
            and (min_reward is None or (reward is not None and reward >= min_reward))
            and (max_reward is None or (reward is not None and reward <= max_reward))
        )

    if not run_dir.root.is_dir():
        raise AstraflowError(Reason.INVALID_FIELD, f"{run_dir.root} is not the folder of a run")
    rows = [
        row
        for path in sorted(run_dir.rollouts.glob("*.jsonl"))
        for row in read_json_lines(path)
        if is_wanted(row)
    ]
    # Each policy has a file of its own.
    return sorted(rows, key=itemgetter("time"))[-count:]


def show_rollouts(
    console: Console, run_dir: RunDir, rows: Sequence[dict[str, Any]], *, as_json: bool
) -> None:
    """Print rollouts as a table, or one JSON object a line; what was sampled stands out.

    What lies in the payload store is read from there, as long as the run has not removed it.
    """
    rows = [
        row | {"trajectories": list(map(whole_trajectory, row["trajectories"]))} for row in rows
    ]
    if as_json:
        for row in rows:
            console.file.write(json.dumps(row) + "\n")
        return
    if not rows:
        console.print(f"{run_dir.root} has no rollouts recorded that are like that")
        return
    tokenizers = RunTokenizers(run_dir)
    table = Table("prompt", "what was written", "outcome", "reward", "parts", show_lines=True)
    for row in rows:
        reward = row.get("reward")
        prompt = json.dumps(row["prompt"], ensure_ascii=False)
        table.add_row(
            Text(prompt if len(prompt) <= 80 else prompt[:79] + "…"),
            Text("\n").join(tokenizers.text(part) for part in row["trajectories"]),
            row["outcome"],
            "-" if reward is None else f"{reward:.3g}",
            ", ".join(f"{name} {value:.3g}" for name, value in row["reward_parts"].items()),
        )
    console.print(table)


def whole_trajectory(trajectory: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a trajectory with its tokens, or with why they are not to be had."""
    if "payload" not in trajectory:
        return trajectory
    where = trajectory["payload"]
    try:
        digest = bytes.fromhex(where["digest"])
        content = read_content(Bucket(where["url"]), where["name"], digest, where["nbytes"])
        arrays = read_arrays(content)
    except AstraflowError as error:
        return {**trajectory, "payload": where | {"fault": f"({error.message})"}}
    tokens = {name: arrays[name].astype(int).tolist() for name in ("tokens", "sampled_mask")}
    logprobs = arrays["logprobs"][arrays["sampled_mask"].astype(bool)]
    return {**trajectory, **tokens, "logprobs": [round(each, 4) for each in logprobs.tolist()]}


class RunTokenizers:
    """Turns tokens back into text with the tokenizers of the run's own checkpoints."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._by_policy: dict[str, Any] = {}

    def text(self, trajectory: Mapping[str, Any]) -> Text:
        """Return a trajectory's text: what was given is dim, what was sampled is not."""
        policy = trajectory["policy"]
        text = Text(f"{trajectory['agent'] or policy}: ", style="cyan")
        if "tokens" not in trajectory:
            return text.append(trajectory["payload"]["fault"], style="dim")
        tokenizer = self._tokenizer(policy)
        pairs = zip(trajectory["tokens"], trajectory["sampled_mask"], strict=True)
        for sampled, run in groupby(pairs, key=itemgetter(1)):
            piece = [token for token, _ in run]
            words = " ".join(map(str, piece))
            if tokenizer is not None:
                words = str(tokenizer.decode(piece, skip_special_tokens=False))
            text.append(words, style="bold" if sampled else "dim")
        return text

    def pieces(self, policy: str, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a character of several tokens is the last one's."""
        tokenizer = self._tokenizer(policy)
        if tokenizer is None:
            return [f"{token} " for token in tokens]
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - an extra

        stream: Any = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in tokens]

    def _tokenizer(self, policy: str) -> Any:
        """Return the tokenizer of a policy; None: it is not to be had."""
        if policy not in self._by_policy:
            self._by_policy[policy] = None
            files = sorted(self._run_dir.checkpoints(policy).glob("*/tokenizer.json"))
            if files and find_spec("tokenizers") is not None:
                from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

                self._by_policy[policy] = Tokenizer.from_file(str(files[0]))
        return self._by_policy[policy]
