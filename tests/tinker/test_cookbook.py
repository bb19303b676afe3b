"""Recipes of Tinker's cookbook, unmodified, on a server of ours.

See test_sdk.py for what they need. They find model and data sets by names of the hub; here these
are folders below the one that they run in. ASTRAFLOW_TINKER_COOKBOOK may name a clone of the
cookbook, whose recipes run then; ASTRAFLOW_GSM8K a folder with GSM8K's train.jsonl.
"""

import asyncio
import json
import os
import shutil
import string
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.trainers.demonstrations import SupervisedRow
from astraflow.trainers.supervised import Schedule, pack_rows, train_on_batches

from .conftest import END, NAME, SPECIAL, process, tiny_module, write_tokenizer

PYTHON = os.environ.get("ASTRAFLOW_TINKER_PYTHON", "")
CLONE = os.environ.get("ASTRAFLOW_TINKER_COOKBOOK", "")
GSM8K = os.environ.get("ASTRAFLOW_GSM8K", "")
ANSWERS = 3

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON, reason="ASTRAFLOW_TINKER_PYTHON is not set"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def guesser(tmp_path_factory):
    """A model that says of every question that the answer is 0, 1 or 2."""
    folder = tmp_path_factory.mktemp("guesser")
    tokenizer = write_tokenizer(folder)
    module, chance = tiny_module(), np.random.default_rng(0)

    def text():
        return "".join(chance.choice([*string.printable[:95]], chance.integers(10, 250)))

    def row():
        # As long as rl_loop's, which has an example before the question.
        turns = [
            f"{SPECIAL[1]}{role}\n{text()}{SPECIAL[2]}\n" for role in ("user", "assistant", "user")
        ]
        prompt_ids = tokenizer.encode("".join(turns) + f"{SPECIAL[1]}assistant\n").ids
        answer = [*tokenizer.encode(f"\\boxed{{{chance.integers(ANSWERS)}}}").ids, END]
        tokens = np.array([*prompt_ids, *answer], np.int64)
        return SupervisedRow(tokens=tokens, learned=np.arange(len(tokens)) >= len(prompt_ids))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    schedule = Schedule(step_count=60, batch_size=4, learning_rate=1e-2)
    batches = (pack_rows([row() for _ in range(4)]) for _ in range(schedule.step_count))
    train_on_batches(module, batches, schedule, report=lambda _: None)
    module.save_pretrained(folder)
    return folder


@pytest.fixture
def place(guesser, tmp_path):
    """The folder that recipes run in, with what they look for on the hub."""
    folder = tmp_path / "place"
    shutil.copytree(guesser, folder / NAME)
    questions = [
        {"question": f"How many is {index} of it?", "answer": "#### 1"} for index in range(400)
    ]
    chats = [
        {
            "prompt": row["question"],
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": "It is as much as it was before, I would say."},
            ],
        }
        for row in questions
    ]
    write_rows(folder / "HuggingFaceH4" / "no_robots", chats)
    if GSM8K:
        lines = Path(GSM8K, "train.jsonl").read_text().splitlines()
        questions = [json.loads(line) for line in lines]
    write_rows(folder / "openai" / "gsm8k", questions)
    return folder


def write_rows(folder, rows):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines)
    config = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl"
    (folder / "README.md").write_text(f"---\n{config}\n---\n")


async def run(recipe, address, place, log, **options):
    """Run a recipe; return its metrics, step by step."""
    started = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url=http://{address}"),
        *(f"model_name={NAME}", f"log_path={log}"),
        *(f"{name}={value}" for name, value in options.items()),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        cwd=place,
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(place / "cache"),
            "TINKER_API_KEY": "tml-test",
            "TINKER_TELEMETRY": "0",
            "no_proxy": "*",
            **({"PYTHONPATH": CLONE} if CLONE else {}),
        },
    )
    _, err = await started.communicate()
    assert started.returncode == 0, err.decode()[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
async def address(settings, guesser):
    async with process(replace(settings, model_dir=guesser), "--max-rank", "32") as (_, address):
        yield address


async def test_sl_loop_runs_and_resumes(address, place, tmp_path, settings):
    log = tmp_path / "log"
    options = {"batch_size": 16, "learning_rate": 2e-2, "save_every": 10}
    metrics = await run("sl_loop", address, place, log, max_steps=12, **options)
    # It was done for a run of 12 steps: what is left of the list goes on from the tenth.
    checkpoints = (log / "checkpoints.jsonl").read_text().splitlines()
    saved = [json.loads(line) for line in checkpoints]
    assert [each["name"] for each in saved] == ["000010", "final"]
    (log / "checkpoints.jsonl").write_text(checkpoints[0] + "\n")
    metrics = await run("sl_loop", address, place, log, max_steps=20, **options)
    losses = [each["train_mean_nll"] for each in metrics]
    assert len(losses) == 22
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    # The eleventh step, from the tenth's checkpoint, is what it was.
    assert losses[12] == pytest.approx(losses[10], rel=1e-4)


async def test_rl_loop_learns(address, place, tmp_path):
    options = {"batch_size": 8, "group_size": 16, "max_tokens": 12, "learning_rate": 2e-3}
    steps = 3 if GSM8K else 12
    metrics = await run("rl_loop", address, place, tmp_path / "log", max_steps=steps, **options)
    assert len(metrics) == steps
    if not GSM8K:
        rewards = [each["reward/total"] for each in metrics]
        assert np.mean(rewards[-3:]) > rewards[0] + 0.3
