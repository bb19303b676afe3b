"""Count verdicts per second of small Python programs in sandboxes, each of which is used once.

A verdict is a program on some cases of standard input and output. Beside it, in turns, the same
programs as a plain `python program.py` for each case, with the same number at once: no sandbox, no
limits. Bar: 50 verdicts a second on two cores.

    python benchmarks/sandbox.py --json sandbox.json
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_scorer
from astraflow.workflows.protocol import Score
from verdict import conclude

BAR = 50.0
PROGRAM = """
import sys
numbers = list(map(int, sys.stdin.read().split()))
best = here = 0
for number in numbers:
    here = max(here + number, 0)
    best = max(best, here)
print(best)
"""


def rows(count: int, cases: int) -> list[Prompt]:
    """Return prompts whose tests are the largest sums of neighbours."""
    made: list[Prompt] = []
    for row in range(count):
        inputs: list[str] = []
        outputs: list[str] = []
        for case in range(cases):
            numbers = [(row * 31 + case * 17 + place * 7) % 23 - 11 for place in range(50)]
            best = here = 0
            for number in numbers:
                here = max(here + number, 0)
                best = max(best, here)
            inputs.append(" ".join(map(str, numbers)))
            outputs.append(str(best))
        tests = {"inputs": inputs, "outputs": outputs}
        made.append(Prompt(prompt_id=PromptId(f"{row}"), data_set="d", fields={"tests": tests}))
    return made


async def sandboxed(scorer: Any, prompts: list[Prompt]) -> float:
    """Return verdicts per second."""
    began = time.perf_counter()
    text = f"```python\n{PROGRAM}\n```"
    scores: list[Score] = await asyncio.gather(*(scorer(prompt, text) for prompt in prompts))
    seconds = time.perf_counter() - began
    assert all(score.reward == 1.0 for score in scores)
    return len(prompts) / seconds


async def plain(prompts: list[Prompt], workers: int) -> float:
    """Return verdicts per second of a process for each case."""
    room = asyncio.Semaphore(workers)
    pipe = asyncio.subprocess.PIPE
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(PROGRAM)
        file.flush()

        async def verdict(prompt: Prompt) -> bool:
            tests = prompt.fields["tests"]
            async with room:
                for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
                    process = await asyncio.create_subprocess_exec(
                        sys.executable, file.name, stdin=pipe, stdout=pipe
                    )
                    said, _ = await process.communicate(given.encode())
                    if said.decode().strip() != wanted:
                        return False
            return True

        began = time.perf_counter()
        assert all(await asyncio.gather(*map(verdict, prompts)))
        return len(prompts) / (time.perf_counter() - began)


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Run both in turns."""
    prompts = rows(asked.verdicts, asked.cases)
    options = {"workers": asked.workers, "ready": asked.ready, "sandbox": asked.sandbox}
    scorer: Any = build_scorer("code", options, where="scorer_options")
    sandboxes: list[float] = []
    processes: list[float] = []
    try:
        await sandboxed(scorer, prompts[:4])
        psutil.cpu_percent()
        for _ in range(asked.rounds):
            sandboxes.append(await sandboxed(scorer, prompts))
            processes.append(await plain(prompts[: asked.verdicts // 3], asked.workers))
    finally:
        await scorer.close()
    rate = statistics.median(sandboxes)
    return {
        "sandbox": asked.sandbox,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "cases_per_verdict": asked.cases,
        "verdicts_per_s": sandboxes,
        "plain_verdicts_per_s": processes,
        "ratio": rate / statistics.median(processes),
        "bar": BAR,
        "holds": rate >= BAR,
    }


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--verdicts", type=int, default=150)
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ready", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    measured = asyncio.run(measure(asked))
    for name in ("verdicts_per_s", "plain_verdicts_per_s"):
        print(f"{name:21} {', '.join(f'{rate:.0f}' for rate in measured[name])}")
    print(f"{measured['ratio']:.2f} x plain processes; bar {BAR:.0f}/s")
    conclude(measured, asked.json)


if __name__ == "__main__":
    main()
