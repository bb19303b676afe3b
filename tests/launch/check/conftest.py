"""A folder with data, models and code of users, right and wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from letter_sort import tiny_llama_config
from safetensors.numpy import save_file

from astraflow.workflows.tutors import write_tokenizer

ALPHABET = "abcdefghij>"
RECIPE = """
name: sums
policies:
  solver:
    model: {{path: {folder}/model}}
    sampling: {{max_new_tokens: 8}}
    trainer: {{step_count: 4, groups_per_batch: 4, optimizer: {{learning_rate: 1e-4}}}}
data:
  train: {{path: {folder}/train.jsonl, id_field: id}}
  held_out: {{path: {folder}/held_out.jsonl, id_field: id}}
workflows:
  answer: {{name: single_turn, scorer: exact}}
rollouts: {{data_set: train, workflow: answer, group_size: 4}}
evals:
  held_out: {{data_sets: [{{data_set: held_out, workflow: answer}}]}}
track: []
"""
CODE = '''
import asyncio
import os
import subprocess
import time
from dataclasses import dataclass

from astraflow.config.recipe import Strict
from astraflow.workflows.protocol import PolicyFault, Score


class Plain:
    def __init__(self, options, scorer):
        self.scorer = scorer

    async def run(self, episode):
        talk = episode.trajectory()
        talk.observe(episode.prompt.fields["prompt"])
        reply = await talk.sample()
        return await self.scorer(episode.prompt, reply.text)


class FaultOnWrong(Plain):
    async def run(self, episode):
        score = await super().run(episode)
        if score.reward < 1:
            raise PolicyFault("it is no answer", reward=-0.5)
        return score


class FaultBeforeSampling(Plain):
    async def run(self, episode):
        raise PolicyFault("it is no prompt")


class PartsOfText(Plain):
    async def run(self, episode):
        await super().run(episode)
        return Score(reward=1.0, parts={"kind": "good"})


class NotAsync(Plain):
    def run(self, episode):
        return Score(reward=1.0)


class TwoArguments(Plain):
    async def run(self, episode, more):
        return Score(reward=1.0)


class NoRun:
    def __init__(self, options, scorer):
        pass


class RaisesWhenMade(Plain):
    def __init__(self, options, scorer):
        raise RuntimeError("no game server is known")


class ExitsWhenMade(Plain):
    def __init__(self, options, scorer):
        raise SystemExit("no key of a game server is set")


class OfOneArgument(Plain):
    def __init__(self, options):
        pass


class ReturnsNothing(Plain):
    async def run(self, episode):
        await super().run(episode)


class SamplesNothing(Plain):
    async def run(self, episode):
        return 1.0


class SecondTry(Plain):
    """Says what the model has no tokens for, but only after a wrong answer."""

    async def run(self, episode):
        talk = episode.trajectory()
        talk.observe(episode.prompt.fields["prompt"])
        score = await self.scorer(episode.prompt, (await talk.sample()).text)
        if score.reward == 1:
            return score
        talk.observe(" No. Again: ")
        return await self.scorer(episode.prompt, (await talk.sample()).text)


class WrongPolicy(Plain):
    async def run(self, episode):
        episode.trajectory("slover")


class WithOptions(Plain):
    class Options(Strict):
        turns: int = 1


class OddOptions(Plain):
    Options = 3


class NeverEnds(Plain):
    async def run(self, episode):
        await asyncio.Event().wait()


class Lacking(Plain):
    def lacks(self):
        yield "there is no game of chess here; install one"


class OwnProcess(Plain):
    async def run(self, episode):
        subprocess.run(["true"], check=True)


def spins(prompt, text):
    while True:
        pass


def exits(prompt, text):
    raise SystemExit("no key of a judge is set")


def exits_at_once(prompt, text):
    os._exit(0)


async def awaits_what_was_cancelled(prompt, text):
    other = asyncio.ensure_future(asyncio.Event().wait())
    other.cancel()
    await other


def right(prompt, text):
    return float(text == prompt.fields["answer"])


def one_argument(text):
    return 1.0


def returns_text(prompt, text):
    return "right"


def returns_nan(prompt, text):
    return float("nan")


def raises(prompt, text):
    return 1.0 / prompt.fields["weight"]


def raises_on_wrong(prompt, text):
    return float(int(text == prompt.fields["answer"]) or prompt.fields["partial"])


def never_right(prompt, text):
    return 0.0


def faults_on_wrong(prompt, text):
    if text != prompt.fields["answer"]:
        raise PolicyFault("it is no answer")
    return 1.0


def faults_without_a_number(prompt, text):
    raise PolicyFault("it is no answer", reward=float("nan"))


def gives_parts_of_text(prompt, text):
    return Score(reward=1.0, parts={"kind": "good"})


def boxed(prompt, text):
    return float(text == "\\\\boxed{" + prompt.fields["answer"] + "}")


def half(prompt, text):
    return 0.5 * right(prompt, text)


class Brief:
    """Costs a hundredth per letter, and knows right answers."""

    def __init__(self, options):
        pass

    def __call__(self, prompt, text):
        return right(prompt, text) - 0.01 * len(text)

    def gold(self, prompt):
        return prompt.fields["answer"]


class Moody(Brief):
    """Does not know one right answer."""

    def __call__(self, prompt, text):
        return 0.0 if prompt.fields["id"] == "aa" else right(prompt, text)


def starts_process(prompt, text):
    return float(subprocess.run(["true"]).returncode == 0)


THING = 3


class NoDataclass:
    pass


def summed(terms, settings, limits):
    return (-terms.logprobs * terms.advantages).sum()


def unknown_rate(parameters, settings):
    import torch

    return torch.optim.SGD(parameters.values(), lr=settings.rate)


def mean_alone(rewards):
    return rewards.mean()


def make_engine(settings, width):
    raise AssertionError("a check makes no engine")
'''


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(letters: str, count: int) -> list[dict]:
    made = [f"{letters[i % len(letters)]}{letters[i // len(letters)]}" for i in range(count)]
    return [{"id": text, "prompt": f"{text}>", "answer": text[::-1]} for text in made]


def write_model(folder: Path, **config: object) -> Path:
    fields = {**tiny_llama_config(ALPHABET), **config}
    write_tokenizer(folder, ALPHABET)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {
        "model.embed_tokens.weight": np.zeros((fields["vocab_size"], 96), np.float32),
        "model.layers.0.self_attn.q_proj.weight": np.zeros((96, 96), np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def certificate(folder: Path, name: str) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        f" -subj /CN=localhost -keyout {folder}/{name}.key -out {folder}/{name}.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """What recipes of these tests name."""
    made = tmp_path_factory.mktemp("check")
    _write_data(made)
    _write_models(made)
    (made / "recipe.yaml").write_text(RECIPE.format(folder=made))
    (made / "user_code.py").write_text(CODE)
    # Of those that are frozen into the interpreter, which are found before any folder.
    (made / "stat.py").write_text("class Mine: ...")
    (made / "user_syntax.py").write_text("class Plain:\n    def run(self:\n        pass\n")
    (made / "user_import.py").write_text("import json\nimport no_such_package\n")
    (made / "user_name.py").write_text("import json\n\nLIMIT = undefined_limit\n")
    (made / "file").touch()
    if shutil.which("openssl"):
        certificate(made, "one")
        certificate(made, "other")
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))


def _write_data(made: Path) -> None:
    train, held_out = rows("abcde", 20), rows("fghij", 10)
    write_rows(made / "train.jsonl", train)
    write_rows(made / "held_out.jsonl", held_out)
    write_rows(made / "half.jsonl", [*train[1:], {**train[0], "note": "\ud83d"}])
    (made / "empty.jsonl").touch()
    (made / "broken.jsonl").write_text('{"id": "1", "prompt": "a>", "answer": "a"}\n{"id": \n')
    (made / "list.jsonl").write_text('["a"]\n')
    (made / "rows.csv").write_text("id,prompt\n")
    demos = [{"prompt": row["prompt"], "completion": row["answer"]} for row in train]
    write_rows(made / "demos.jsonl", demos)
    write_rows(made / "twice.jsonl", [*train, train[3]])
    write_rows(made / "no_id.jsonl", [*train, {"prompt": "a>", "answer": "a"}])
    write_rows(made / "no_answer.jsonl", [*train, {"id": "last", "prompt": "a>"}])
    write_rows(made / "foreign.jsonl", [{"id": "1", "prompt": "a>", "answer": "xyz"}])
    long = [{"id": str(i), "prompt": "a" * 70 + ">", "answer": "a"} for i in range(6)]
    write_rows(made / "long.jsonl", long)
    write_rows(made / "some_long.jsonl", [*train, *long[:3]])


def _write_models(made: Path) -> None:
    write_model(made / "model")
    write_model(made / "other_vocabulary", vocab_size=99)
    (write_model(made / "no_tokenizer") / "tokenizer.json").unlink()
    (write_model(made / "no_weights") / "model.safetensors").unlink()
    (write_model(made / "broken_tokenizer") / "tokenizer.json").write_text("{}")
    (write_model(made / "broken_config") / "config.json").write_text("{")
    write_model(made / "small_vocabulary", vocab_size=9)
    (made / "no_context").mkdir()
    bare = write_model(made / "no_context") / "config.json"
    bare.write_text(json.dumps({"vocab_size": 14}))
    cut = write_model(made / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    pointer = write_model(made / "pointer") / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    shards = write_model(made / "shards") / "model.safetensors.index.json"
    files = ("model.safetensors", "model-00002-of-00002.safetensors")
    shards.write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    (made / "fake.gguf").write_bytes(b"none of it")
    template = "{% for message in messages %}{{ message.content }"
    (write_model(made / "bad_template") / "chat_template.jinja").write_text(template)
    silent = write_model(made / "silent_template") / "chat_template.jinja"
    silent.write_text("<bos>{% for message in messages %}{% endfor %}")
