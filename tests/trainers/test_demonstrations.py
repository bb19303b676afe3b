"""Demonstrations become rows, of which what the model says is learned; and models that say it."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import ModelConfig
from astraflow.core.errors import AstraflowError
from astraflow.trainers.demonstrations import (
    SupervisedRow,
    read_demonstrations,
    tokenize_demonstrations,
)
from astraflow.trainers.passes import plan_passes
from astraflow.trainers.supervised import (
    Schedule,
    demonstrated_batches,
    pack_rows,
    supervised_learner,
)
from astraflow.trainers.warm_up import demonstrated_key, ensure_model
from tests.trainers.conftest import seen_gradients

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "open the box"},
    {"role": "assistant", "content": "take key"},
    {"role": "user", "content": "you have the key"},
    {"role": "assistant", "content": "open box"},
]
# Forgets what the assistant said before the last user, as templates of reasoning models do.
FORGETFUL = (
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in messages %}{% set old = m.role == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>' + m.role + '\n' + ('...' if old else m.content) + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny(path, **warm_up):
    settings = {"demonstrations": path, "step_count": 4, "batch_size": 4, **warm_up}
    return ModelConfig.model_validate(
        {"tiny": {"hidden_size": 32, "layer_count": 1, "context": 128}, "warm_up": settings}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that has seen the chat."""
    base = tmp_path_factory.mktemp("tiny")
    path = write(base / "demos.jsonl", *[{"messages": CHAT}] * 4)
    return ensure_model(tiny(path), seed=0, cache_dir=base / "cache")


def learned_texts(row, folder):
    """Return the runs of tokens that are learned, as text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs, now = [], []
    for token, is_learned in zip(row.tokens.tolist(), row.learned.tolist(), strict=True):
        if is_learned:
            now.append(token)
        elif now:
            runs.append(tokenizer.decode(now, skip_special_tokens=False))
            now = []
    return [*runs, tokenizer.decode(now, skip_special_tokens=False)] if now else runs


def test_each_turn_of_the_assistant_is_learned_with_its_end(folder):
    (row,) = tokenize_demonstrations([{"messages": CHAT}], folder, max_length=128)
    assert learned_texts(row, folder) == ["take key<|im_end|>", "open box<|im_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(row.tokens) == whole.removesuffix("\n")


def test_a_template_that_rewrites_what_was_said_makes_a_row_of_each_turn(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    rows = tokenize_demonstrations([{"messages": CHAT}], tmp_path, max_length=128)
    texts = [learned_texts(row, tmp_path) for row in rows]
    assert texts == [["take key<|im_end|>"], ["open box<|im_end|>"]]


def test_a_completion_is_learned_with_its_end(folder):
    demonstration = {"prompt": "3 + 4 =", "completion": " 7"}
    (row,) = tokenize_demonstrations([demonstration], folder, max_length=128)
    assert learned_texts(row, folder) == [" 7<|im_end|>"]


def test_a_tokenizer_that_cuts_and_pads_what_it_is_given_does_neither_here(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    demonstrations = [{"messages": CHAT}, {"prompt": "open the", "completion": " box with it"}]
    wanted, found = (
        tokenize_demonstrations(demonstrations, each, max_length=128) for each in (folder, tmp_path)
    )
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in wanted]


def test_what_is_too_long_is_left_out(folder):
    short, long = ({"prompt": "a", "completion": "b" * count} for count in (1, 200))
    told = []
    both = tokenize_demonstrations([short, long], folder, max_length=32, report=told.append)
    assert len(both) == 1
    assert told == ["1 of 2 rows are left out: they have more than max_length, 32 tokens"]
    with pytest.raises(AstraflowError, match="every demonstration is longer than max_length, 32"):
        tokenize_demonstrations([long], folder, max_length=32)


def test_messages_need_a_template(folder, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(AstraflowError, match=r"demonstration 1: .* has no chat template"):
        tokenize_demonstrations([{"messages": CHAT}], tmp_path, max_length=128)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "row 2 has text; a demonstration has 'messages'"),
        ({"prompt": "a", "completion": 7}, "row 2 has prompt, completion"),
        ({"messages": "hello"}, "no list"),
        ({"messages": ["hello"]}, "not all objects with a 'role'"),
        ({"messages": CHAT[:2]}, "no message of the assistant"),
    ],
)
def test_rows_that_are_no_demonstrations_are_named(tmp_path, row, said):
    path = write(tmp_path / "demos.jsonl", {"messages": CHAT}, row)
    with pytest.raises(AstraflowError, match=said):
        read_demonstrations(path)


def test_files_without_demonstrations_are_named(tmp_path):
    with pytest.raises(AstraflowError, match="has no demonstrations"):
        read_demonstrations(write(tmp_path / "demos.jsonl"))
    with pytest.raises(AstraflowError, match=r"missing\.jsonl cannot be read"):
        read_demonstrations(tmp_path / "missing.jsonl")


def test_the_loss_is_the_mean_over_learned_tokens_however_it_is_divided(folder, monkeypatch):
    """Against logits of every position, and gradients of one pass."""
    made = tokenize_demonstrations(
        [{"messages": CHAT}, {"prompt": "open", "completion": " the box"}] * 3,
        folder,
        max_length=128,
    )
    module = AutoModelForCausalLM.from_pretrained(folder)
    total, count = torch.zeros(()), sum(int(row.learned.sum()) for row in made)
    for row in made:
        labels = torch.tensor(np.where(row.learned, row.tokens, -100))
        logits = module(torch.tensor(row.tokens)[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
    expected = total / count
    expected.backward()
    gradients = {name: each.grad.clone() for name, each in module.named_parameters()}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    module.zero_grad()
    monkeypatch.setattr("astraflow.trainers.supervised._PASS_TOKENS", 70)
    rows = pack_rows(made)
    assert len(plan_passes(rows.lengths, max_tokens=70)) > 2
    schedule = Schedule(step_count=1, batch_size=6, learning_rate=1e-3)
    with seen_gradients(module) as seen:
        said = supervised_learner(module, schedule).step(rows, divisor=len(rows.loss))
    assert said["train/loss"] == pytest.approx(expected.item(), abs=1e-5)
    for name, each in seen[0].items():
        wanted = gradients[name] / max(1, norm)
        torch.testing.assert_close(each, wanted, atol=1e-6, rtol=1e-4)


def test_every_row_comes_once_a_pass_and_lengths_are_together():
    rows = [
        SupervisedRow(tokens=np.full(1 + index % 50, index), learned=np.ones(1 + index % 50, bool))
        for index in range(320)
    ]
    schedule = Schedule(step_count=80, batch_size=4, learning_rate=1.0)
    batches = list(demonstrated_batches(rows, schedule, seed=0))
    seen = np.concatenate([batch.tokens[batch.offsets[:-1]] for batch in batches])
    assert sorted(seen.tolist()) == list(range(320))
    used = sum(len(batch.tokens) for batch in batches)
    assert used / sum(4 * batch.lengths.max() for batch in batches) > 0.8


def test_steps_are_three_passes_for_a_model_that_is_given():
    settings = ModelConfig.model_validate({"name": "a", "warm_up": {"demonstrations": "d"}}).warm_up
    given = Schedule.of(settings, row_count=100)
    assert (given.step_count, given.batch_size, given.learning_rate) == (38, 8, 1e-4)
    fresh = Schedule.of(settings)
    assert (fresh.step_count, fresh.batch_size, fresh.learning_rate) == (300, 64, 2e-3)


def test_a_tiny_model_learns_to_say_what_it_was_shown(tmp_path):
    path = write(tmp_path / "demos.jsonl", *[{"messages": CHAT}] * 8)
    said = []
    model = tiny(path, step_count=60, batch_size=8)
    made = ensure_model(model, seed=0, cache_dir=tmp_path / "cache", report=said.append)
    assert said[0].startswith("learning from 8 demonstrations (8 rows")
    assert said[1].startswith("warm-up step 1/60 loss ")
    assert said[-1].startswith("warm-up step 60/60 loss ")
    tokenizer = AutoTokenizer.from_pretrained(made)
    asked = tokenizer.apply_chat_template(
        CHAT[:2], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = AutoModelForCausalLM.from_pretrained(made).generate(
        **asked, do_sample=False, max_new_tokens=12
    )[0, asked.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "take key<|im_end|>"
    assert tokenizer.decode(tokenizer("Ünknown wörds\n").input_ids) == "Ünknown wörds\n"


def test_it_is_made_once_and_again_when_anything_changes(tmp_path, folder):
    path = write(tmp_path / "demos.jsonl", *[{"messages": CHAT}] * 4)
    cache = tmp_path / "cache"
    given = ModelConfig.model_validate(
        {"path": folder, "warm_up": {"demonstrations": path, "step_count": 2, "batch_size": 2}}
    )
    made = ensure_model(given, seed=0, cache_dir=cache)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(given, seed=0, cache_dir=cache) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert [each.name for each in made.parent.iterdir()] == [made.name]
    keys = {demonstrated_key(given, folder, seed=0), demonstrated_key(given, folder, seed=1)}
    keys.add(demonstrated_key(given, made, seed=0))
    write(path, {"messages": CHAT})
    keys.add(demonstrated_key(given, folder, seed=0))
    assert len(keys) == 4
    path.rename(tmp_path / "moved.jsonl")
    moved = given.warm_up.model_copy(update={"demonstrations": tmp_path / "moved.jsonl"})
    assert demonstrated_key(given.model_copy(update={"warm_up": moved}), folder, seed=0) in keys


def test_where_it_cannot_be_kept_is_told_before_it_is_made(tmp_path, folder):
    path = write(tmp_path / "demos.jsonl", *[{"messages": CHAT}] * 4)
    steps = []
    with pytest.raises(AstraflowError, match=r"demos\.jsonl is no folder .* XDG_CACHE_HOME"):
        ensure_model(tiny(path), seed=0, cache_dir=path / "cache", report=steps.append)
    assert not steps


def test_a_loss_that_is_not_finite_stops_it(tmp_path, folder):
    path = write(tmp_path / "demos.jsonl", *[{"messages": CHAT}] * 4)
    model = tiny(path, learning_rate=1e30)
    with pytest.raises(AstraflowError, match=r"lower warm_up\.learning_rate"):
        ensure_model(model, seed=0, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
