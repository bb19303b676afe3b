import json
from dataclasses import replace

import pytest

from astraflow.config.loader import load_recipe
from astraflow.core.errors import AstraflowError
from astraflow.core.tasks import SamplingParams
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds
from astraflow.raas.policies import ServedModel, chat_template, turn_end_ids
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe
from astraflow.workflows.agents.template import PLAIN, ChatTemplate
from tests.workflows.agents.conftest import TEMPLATES, raw_tokenizer, template_of, tokenizer_for


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    source = (TEMPLATES / "qwen3_like.jinja").read_text(encoding="utf-8")
    settings = {"chat_template": source, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def with_model(tmp_path, **keys):
    changes = {f"policies.solver.model.{key}": value for key, value in keys.items()}
    return small_recipe(tmp_path, changes=changes)


def test_variables_of_a_recipe_reach_the_template(tmp_path, model_dir):
    recipe = with_model(tmp_path, chat_template_kwargs={"enable_thinking": False})
    template = chat_template(recipe, "solver", model_dir)
    assert template.render([{"role": "user", "content": "1"}]).endswith("</think>\n\n")


def test_a_template_of_a_recipe_stands_in_for_the_models_own(tmp_path, model_dir):
    recipe = with_model(tmp_path, chat_template=str(TEMPLATES / "chatml.jinja"))
    assert chat_template(recipe, "solver", model_dir).check.warnings == ()
    missing = with_model(tmp_path, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(AstraflowError, match=r"none\.jinja is no file"):
        chat_template(missing, "solver", model_dir)


def test_a_model_without_a_template_reads_contents(tmp_path):
    assert chat_template(with_model(tmp_path), "solver", tmp_path).source == PLAIN


def test_a_template_of_a_recipe_starts_at_its_folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "name: a\n"
        "policies: {p: {model: {path: m, chat_template: chat.jinja}, trainer: {step_count: 1,"
        " groups_per_batch: 1}}}\n"
        "data: {d: {path: d.jsonl}}\n"
        "workflows: {w: {name: single_turn, scorer: exact}}\n"
        "rollouts: {data_set: d, workflow: w}\n",
        encoding="utf-8",
    )
    model = load_recipe(tmp_path / "recipe.yaml").policies["p"].model
    assert model.chat_template == tmp_path / "chat.jinja"


def test_the_end_of_a_turn_ends_a_generation_too():
    template = template_of("chatml")
    end = raw_tokenizer().token_to_id("<|im_end|>")
    other = raw_tokenizer().token_to_id("</s>")
    base = FastTokenizer(
        raw_tokenizer(), SpecialIds(eos=frozenset({other}), never_sampled=frozenset())
    )
    assert turn_end_ids(template, base) == (end,)
    assert turn_end_ids(template, tokenizer_for("chatml")) == ()
    assert turn_end_ids(ChatTemplate(), base) == ()


def test_a_port_stops_where_its_template_ends_a_turn(make_task):
    sampling = SamplingParams(stop_token_ids=(7,), max_new_tokens=3)
    task = replace(make_task(), sampling={"solver": sampling})
    served = ServedModel(engine=SmallEngine(), tokenizer=CharTokenizer(), turn_end_ids=(9,))
    port = served.port("solver", task, 0, version=4)
    assert (port.sampling.stop_token_ids, port.version) == ((7, 9), 4)
    assert port.sampling.seed is not None
