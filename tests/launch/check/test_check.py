"""Wrong recipes: each is refused with the place of its fault and its cure, and starts nothing."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.launch.check import Severity, check_recipe
from astraflow.launch.check.recipe import _CHECKS

RECIPES = Path(__file__).parents[3] / "recipes"
ERROR, WARNING, NOTE = Severity


@dataclass(frozen=True)
class Wrong:
    """A recipe with one fault: overrides of the right one, and what has to be told of it."""

    name: str
    overrides: tuple[str, ...]
    place: str
    said: tuple[str, ...]

    def __str__(self):
        return self.name


ANSWER = "workflows.answer"
TRAINER = "policies.solver.trainer"
MODEL = "policies.solver.model"


def own(what):
    return f"{ANSWER}.name=user_code:{what}"


def scored(what):
    return f"{ANSWER}.scorer=user_code:{what}"


def model(what):
    return f"{MODEL}.path=model_of/{what}"


def data(what):
    return f"data.train.path=data_of/{what}.jsonl"


WRONG = [
    Wrong("unknown key", (f"{TRAINER}.step_cuont=3",), f"{TRAINER}.step_cuont", ("step_count",)),
    Wrong(
        "wrong type",
        (f"{TRAINER}.groups_per_batch=many",),
        f"{TRAINER}.groups_per_batch",
        ("integer",),
    ),
    Wrong("out of range", ("rollouts.group_size=0",), "rollouts.group_size", ("greater than",)),
    Wrong("no override", ("rollouts.group_size",), "", ("a.b=value",)),
    Wrong(
        "unknown workflow name",
        ("rollouts.workflow=answers",),
        "rollouts.workflow",
        ("none of answer",),
    ),
    Wrong(
        "unknown data set", ("rollouts.data_set=trian",), "rollouts.data_set", ("none of train",)
    ),
    Wrong("no origin of a model", (f"{MODEL}.path=null",), MODEL, ("exactly one of",)),
    Wrong(
        "workflow that is none", (f"{ANSWER}.name=single_trun",), f"{ANSWER}.name", ("single_turn",)
    ),
    Wrong(
        "no such module",
        (f"{ANSWER}.name=nowhere_to_be:Found",),
        f"{ANSWER}.name",
        ("nowhere_to_be", "PYTHONPATH"),
    ),
    Wrong(
        "file that a module of Python hides",
        (f"{ANSWER}.name=stat:Mine",),
        f"{ANSWER}.name",
        ("stat.py, which goes first", "another name"),
    ),
    Wrong("no such class", (own("Plian"),), f"{ANSWER}.name", ("Plian", "did you mean Plain")),
    Wrong("no class at all", (own("THING"),), f"{ANSWER}.name", ("cannot be called",)),
    Wrong(
        "syntax error",
        (f"{ANSWER}.name=user_syntax:Plain",),
        f"{ANSWER}.name",
        ("user_syntax.py, line 2", "def run(self:"),
    ),
    Wrong(
        "missing package",
        (f"{ANSWER}.name=user_import:Plain",),
        f"{ANSWER}.name",
        ("no_such_package", "user_import.py, line 2"),
    ),
    Wrong(
        "error at import",
        (f"{ANSWER}.name=user_name:Plain",),
        f"{ANSWER}.name",
        ("NameError", "user_name.py, line 3"),
    ),
    Wrong("run is not async", (own("NotAsync"),), f"{ANSWER}.name", ("not async", "async def run")),
    Wrong("run takes too much", (own("TwoArguments"),), f"{ANSWER}.name", ("episode alone",)),
    Wrong("no run", (own("NoRun"),), f"{ANSWER}.name", ("no method run",)),
    Wrong(
        "cannot be made",
        (own("RaisesWhenMade"),),
        ANSWER,
        ("no game server is known", "user_code.py, line"),
    ),
    Wrong(
        "ends the process when it is made",
        (own("ExitsWhenMade"),),
        ANSWER,
        ("SystemExit: no key of a game server is set", "user_code.py, line"),
    ),
    Wrong(
        "ends the process when it scores",
        (scored("exits"),),
        f"{ANSWER}.scorer",
        ("SystemExit: no key of a judge is set", "row 1 of train", "user_code.py, line"),
    ),
    Wrong(
        "takes no scorer", (own("OfOneArgument"),), ANSWER, ("TypeError", "positional arguments")
    ),
    Wrong(
        "returns nothing", (own("ReturnsNothing"),), ANSWER, ("returned NoneType", "row 1 of train")
    ),
    Wrong("samples nothing", (own("SamplesNothing"),), ANSWER, ("without sampling",)),
    Wrong(
        "raises after a wrong answer",
        (own("SecondTry"),),
        ANSWER,
        ("row 1 of train", "user_code.py, line", "No. Again"),
    ),
    Wrong("policy that is none", (own("WrongPolicy"),), ANSWER, ("no policy slover",)),
    Wrong(
        "lacks something here",
        (own("Lacking"),),
        f"{ANSWER}.options",
        ("no game of chess", "install one"),
    ),
    Wrong(
        "store that nothing reads",
        ("rollouts.payloads.url=gss://bucket/x",),
        "rollouts.payloads.url",
        ("no store 'gss'", "did you mean gs"),
    ),
    Wrong(
        "unknown option",
        (f"{ANSWER}.options.sytem=x",),
        f"{ANSWER}.options.sytem",
        ("did you mean 'system'",),
    ),
    Wrong(
        "option of the wrong type",
        (own("WithOptions"), f"{ANSWER}.options.turns=many"),
        f"{ANSWER}.options.turns",
        ("integer",),
    ),
    Wrong(
        "options are no model", (own("OddOptions"),), f"{ANSWER}.options", ("no pydantic model",)
    ),
    Wrong("no scorer", (f"{ANSWER}.scorer=null",), f"{ANSWER}.scorer", ("scorer: exact",)),
    Wrong("scorer that is none", (f"{ANSWER}.scorer=numerical",), f"{ANSWER}.scorer", ("numeric",)),
    Wrong(
        "scorer of one argument",
        (scored("one_argument"),),
        f"{ANSWER}.scorer",
        ("a prompt and a text",),
    ),
    Wrong("scorer returns text", (scored("returns_text"),), f"{ANSWER}.scorer", ("returned str",)),
    Wrong(
        "scorer returns nan", (scored("returns_nan"),), f"{ANSWER}.scorer", ("reward of float nan",)
    ),
    Wrong(
        "scorer gives a part that is no number",
        (scored("gives_parts_of_text"),),
        f"{ANSWER}.scorer",
        ("parts with str 'kind'", "user_code.py:"),
    ),
    Wrong(
        "workflow gives a part that is no number",
        (own("PartsOfText"),),
        ANSWER,
        ("parts with str 'kind'", "user_code.py:"),
    ),
    Wrong(
        "a fault of the policy that is worth no number",
        (scored("faults_without_a_number"),),
        f"{ANSWER}.scorer",
        ("reward of float nan",),
    ),
    Wrong(
        "a fault of the policy before it sampled",
        (own("FaultBeforeSampling"),),
        ANSWER,
        ("PolicyFault: it is no prompt",),
    ),
    Wrong(
        "scorer raises",
        (scored("raises"),),
        f"{ANSWER}.scorer",
        ("KeyError: 'weight'", 'prompt.fields["weight"]'),
    ),
    Wrong(
        "scorer raises on a wrong answer",
        (scored("raises_on_wrong"),),
        f"{ANSWER}.scorer",
        ("KeyError: 'partial'", 'prompt.fields["partial"]'),
    ),
    Wrong(
        "scorer is never content",
        (scored("never_right"),),
        f"{ANSWER}.scorer",
        ("scores 0, not 1", "gold(prompt)"),
    ),
    Wrong(
        "scorer of another field",
        (f"{ANSWER}.scorer_options.field=answers",),
        f"{ANSWER}.scorer",
        ("no field 'answers'", "scorer_options"),
    ),
    Wrong(
        "unknown option of a scorer",
        (f"{ANSWER}.scorer_options.feild=answer",),
        f"{ANSWER}.scorer_options.feild",
        ("did you mean 'field'",),
    ),
    Wrong(
        "pattern that is none",
        (f"{ANSWER}.scorer=regex", f"{ANSWER}.scorer_options.pattern='('"),
        f"{ANSWER}.scorer_options.pattern",
        ("unterminated",),
    ),
    Wrong(
        "process of a scorer that is none",
        (f"{ANSWER}.scorer=process", f"{ANSWER}.scorer_options.scorer=user_code:rihgt"),
        f"{ANSWER}.scorer_options",
        ("did you mean right",),
    ),
    Wrong(
        "prompt names no field",
        (f"{ANSWER}.options.text='{{question}}'",),
        ANSWER,
        ("no field 'question'", "id, prompt, answer"),
    ),
    Wrong(
        "gold can never count",
        ("evals.held_out.data_sets.0.correct_reward=2",),
        "evals.held_out.data_sets.0.correct_reward",
        ("scores 1, not 2",),
    ),
    Wrong(
        "tutor that is none",
        (f"{MODEL}.path=null", f"{MODEL}.warm_up.tutor=letter_sort:SortTuter"),
        f"{MODEL}.warm_up.tutor",
        ("letter_sort", "SortTuter"),
    ),
    Wrong(
        "option of a tutor",
        (
            f"{MODEL}.path=null",
            f"{MODEL}.warm_up={{tutor: letter_sort:SortTutor, options: {{accuracy: 3}}}}",
        ),
        f"{MODEL}.warm_up.options.accuracy",
        ("less than",),
    ),
    Wrong(
        "selector that is none",
        ("rollouts.selectors=[gresso]",),
        "rollouts.selectors.0",
        ("did you mean greso",),
    ),
    Wrong(
        "option of a filter",
        ("rollouts.filters=[{name: zero_advantage, options: {epsilom: 1}}]",),
        "rollouts.filters.0",
        ("epsilom",),
    ),
    Wrong(
        "guard that is none of the kind",
        (f"{TRAINER}.guards=['user_code:NoDataclass']",),
        f"{TRAINER}.guards.0",
        ("dataclass",),
    ),
    Wrong(
        "replay order that is none",
        (f"{TRAINER}.replay={{ratio: 0.3, order: newest}}",),
        f"{TRAINER}.replay.order",
        ("latest",),
    ),
    Wrong(
        "engine that is none",
        (f"{TRAINER}.engine=user_code:make_egnine",),
        f"{TRAINER}.engine.name",
        ("did you mean make_engine",),
    ),
    Wrong(
        "option of an engine",
        (f"{TRAINER}.engine={{name: 'user_code:make_engine', options: {{wdith: 3}}}}",),
        f"{TRAINER}.engine.options",
        ("width",),
    ),
    Wrong(
        "loss that adds up itself",
        (f"{TRAINER}.loss.surrogate=user_code:summed",),
        f"{TRAINER}.loss",
        ("returned ()", "one cost for each of the 5 tokens"),
    ),
    Wrong(
        "loss that is none",
        (f"{TRAINER}.loss.surrogate=user_code:sumed",),
        f"{TRAINER}.loss",
        ("did you mean summed",),
    ),
    Wrong(
        "advantage of a group",
        (f"{TRAINER}.advantages.estimator=user_code:mean_alone",),
        f"{TRAINER}.advantages.estimator",
        ("one finite advantage for each",),
    ),
    Wrong(
        "optimizer that raises",
        (f"{TRAINER}.optimizer.kind=user_code:unknown_rate",),
        f"{TRAINER}.optimizer",
        ("no attribute 'rate'",),
    ),
    Wrong(
        "tracker that is none", ("track=[tensorbord]",), "track.0", ("did you mean tensorboard",)
    ),
    Wrong(
        "tracker that is not there",
        ("track=['nowhere_to_be:Tracker']",),
        "track.0",
        ("nowhere_to_be",),
    ),
    Wrong("exporter that is none", ("tracing.exporter=otlpp",), "tracing.exporter", ("otlpp",)),
    Wrong(
        "no data",
        ("data.train.path=nowhere.jsonl",),
        "data.train.path",
        ("does not exist", "relative paths"),
    ),
    Wrong(
        "data of no format",
        ("data.train.path=data_of/rows.csv",),
        "data.train",
        ("what format", "Set format"),
    ),
    Wrong("row that is no JSON", (data("broken"),), "data.train", ("row 2 is not JSON",)),
    Wrong("row that is no object", (data("list"),), "data.train", ("row 1 is not a JSON object",)),
    Wrong("id given twice", (data("twice"),), "data.train", ("row 21 has the id 'da'",)),
    Wrong("row without an id", (data("no_id"),), "data.train", ("row 21 has no 'id'",)),
    Wrong("no rows", (data("empty"),), "data.train.path", ("no rows",)),
    Wrong(
        "all rows left out",
        ("data.train.max_prompt_chars=1",),
        "data.train.max_prompt_chars",
        ("all 20 rows are longer",),
    ),
    Wrong(
        "one row without an answer",
        (data("no_answer"),),
        f"{ANSWER}.scorer",
        ("no field 'answer'", "row 21 of train"),
    ),
    Wrong(
        "every prompt too long",
        (data("long"),),
        "data.train",
        ("every prompt has more tokens", "max_prompt_chars"),
    ),
    Wrong(
        "answer that has no tokens",
        (data("foreign"),),
        MODEL,
        ("cannot write the right answer 'xyz'",),
    ),
    Wrong(
        "no model", (f"{MODEL}.path=nowhere",), f"{MODEL}.path", ("not a directory", "config.json")
    ),
    Wrong(
        "model of no name",
        (f"{MODEL}={{name: smollm2-153m}}",),
        f"{MODEL}.name",
        ("did you mean 'smollm2-135m'",),
    ),
    Wrong(
        "GGUF file that is none",
        (f"{MODEL}.path=model_of/fake.gguf",),
        f"{MODEL}.path",
        ("no GGUF file",),
    ),
    Wrong(
        "no demonstrations",
        (f"{MODEL}.warm_up.demonstrations=data_of/empty.jsonl",),
        f"{MODEL}.warm_up.demonstrations",
        ("no demonstrations",),
    ),
    Wrong(
        "demonstrations of another form",
        (f"{MODEL}={{tiny: {{}}, warm_up: {{demonstrations: data_of/train.jsonl}}}}",),
        f"{MODEL}.warm_up.demonstrations",
        ("'prompt' and 'completion'",),
    ),
    Wrong(
        "demonstrations that are too long",
        (
            f"{MODEL}={{tiny: {{}}, warm_up: {{demonstrations: data_of/demos.jsonl,"
            " max_length: 2}}",
        ),
        f"{MODEL}.warm_up.demonstrations",
        ("longer than max_length",),
    ),
    Wrong(
        "tiny model without room",
        (
            f"{MODEL}={{tiny: {{context: 16}}, warm_up: {{demonstrations: data_of/demos.jsonl}}}}",
            "policies.solver.sampling.max_new_tokens=16",
        ),
        "policies.solver.sampling.max_new_tokens",
        ("no room for a prompt",),
    ),
    Wrong("no tokenizer", (model("no_tokenizer"),), f"{MODEL}.path", ("tokenizer.json",)),
    Wrong("no weights", (model("no_weights"),), f"{MODEL}.path", ("safetensors",)),
    Wrong("broken tokenizer", (model("broken_tokenizer"),), f"{MODEL}.path", ("no tokenizer",)),
    Wrong("broken config", (model("broken_config"),), f"{MODEL}.path", ("config.json",)),
    Wrong(
        "config without a context",
        (model("no_context"),),
        f"{MODEL}.path",
        ("max_position_embeddings",),
    ),
    Wrong(
        "vocabulary too small",
        (model("small_vocabulary"),),
        f"{MODEL}.path",
        ("14 tokens", "vocab_size of 9"),
    ),
    Wrong("weights cut off", (model("cut"),), f"{MODEL}.path", ("model.safetensors", "copy")),
    Wrong("pointer for weights", (model("pointer"),), f"{MODEL}.path", ("git lfs pull",)),
    Wrong(
        "missing shard", (model("shards"),), f"{MODEL}.path", ("model-00002-of-00002.safetensors",)
    ),
    Wrong("template that is none", (model("bad_template"),), f"{MODEL}.path", ("unexpected '}'",)),
    Wrong(
        "template that is silent",
        (model("silent_template"),),
        f"{MODEL}.path",
        ("does not show what a user says",),
    ),
    Wrong(
        "layer that is none",
        (f"{MODEL}.lora.targets=[q_prj]",),
        f"{MODEL}.lora.targets",
        ("q_prj", "q_proj"),
    ),
    Wrong(
        "teacher of another vocabulary",
        (f"{TRAINER}.loss.kl={{coefficient: 0.1, reference: model_of/other_vocabulary}}",),
        f"{TRAINER}.loss.kl.reference",
        ("99 tokens",),
    ),
    Wrong(
        "context too long",
        ("raas.engine.max_context=65",),
        "raas.engine.max_context",
        ("more than the 64",),
    ),
    Wrong(
        "no room for a prompt",
        ("policies.solver.sampling.max_new_tokens=64",),
        "policies.solver.sampling.max_new_tokens",
        ("no room for a prompt",),
    ),
    Wrong(
        "empty stop string",
        ("policies.solver.sampling.stop_strings=['']",),
        "policies.solver.sampling.stop_strings",
        ("empty text",),
    ),
    Wrong(
        "no interpreter",
        ("raas.engine={kind: vllm, python: /no/python}",),
        "raas.engine.python",
        ("/no/python",),
    ),
    Wrong(
        "interpreter that is none",
        ("raas.engine={kind: sglang, python: data_of/file}",),
        "raas.engine.python",
        ("cannot be executed",),
    ),
    Wrong(
        "no command",
        (f"{ANSWER}.name=command", f"{ANSWER}.options.command=[no-such-agent]"),
        f"{ANSWER}.options",
        ("no program no-such-agent",),
    ),
    Wrong(
        "no script",
        (f"{ANSWER}.name=command", f"{ANSWER}.options.command=[python3, -S, no/agent.py]"),
        f"{ANSWER}.options",
        ("no/agent.py", "working directory"),
    ),
    Wrong(
        "no interpreter of verifiers",
        (
            f"{ANSWER}.name=verifiers",
            f"{ANSWER}.scorer=null",
            f"{ANSWER}.options={{environment: x, python: /no/python}}",
        ),
        f"{ANSWER}.options",
        ("/no/python",),
    ),
    Wrong(
        "GPU that is not here", ("raas.engine.device=cuda:63",), "raas.engine.device", ("cuda:63",)
    ),
    Wrong("device that is none", (f"{TRAINER}.device=gpu",), f"{TRAINER}.device", ("cuda:N",)),
    Wrong(
        "too few GPUs",
        ("raas.engine={kind: vllm, python: data_of/python, tensor_parallel: 64}",),
        "raas.engine.tensor_parallel",
        ("64 GPUs",),
    ),
    Wrong(
        "one port for two",
        ("hub.listen=127.0.0.1:7471", "http.port=7471"),
        "http.port",
        ("that of hub.listen",),
    ),
    Wrong(
        "one port for all nodes",
        ("raas.count=2", "raas.agents.listen=127.0.0.1:7472"),
        "raas.agents.listen",
        ("2 nodes", "port 0"),
    ),
    Wrong(
        "address of another machine",
        ("hub.listen=192.0.2.1:7473",),
        "hub.listen",
        ("192.0.2.1:7473", "cannot be listened on"),
    ),
    Wrong(
        "no certificate",
        ("hub.tls={certificate: no.pem, key: no.key}",),
        "hub.tls.certificate",
        ("no.pem",),
    ),
    Wrong(
        "certificate without a key",
        ("hub.tls.certificate=data_of/one.pem",),
        "hub.tls",
        ("go together",),
    ),
    Wrong(
        "command with a strange brace",
        ("autoscale.start='sbatch {node}'",),
        "autoscale.start",
        ("{name}",),
    ),
    Wrong(
        "groups of one",
        ("rollouts={group_size: 1, min_group_size: 1, data_set: train, workflow: answer}",),
        "rollouts.group_size",
        ("every advantage of solver is 0",),
    ),
    Wrong(
        "policy that nobody asks",
        ("policies.judge={model: {path: model_of/model}}", f"{ANSWER}.policies=[solver]"),
        f"{ANSWER}.policies",
        ("nothing is sampled from judge",),
    ),
    Wrong(
        "less data than a batch",
        ("rollouts.epochs=1", f"{TRAINER}.groups_per_batch=21"),
        "rollouts.epochs",
        ("20 groups", "21"),
    ),
    Wrong(
        "routes of no experts",
        (f"{TRAINER}.router_replay=required",),
        f"{TRAINER}.router_replay",
        ("the model has no experts",),
    ),
    Wrong(
        "routes that nobody tells",
        (
            f"{TRAINER}.router_replay=required",
            "raas.engine={kind: vllm, python: data_of/python}",
        ),
        "raas.engine.routed_experts",
        ("set it to true",),
    ),
    Wrong(
        "best by nothing",
        (f"{TRAINER}.save.keep={{last: 2, best: eval/heldout}}",),
        f"{TRAINER}.save.keep.best",
        ("did you mean eval/held_out",),
    ),
]


def checked(folder, *overrides, **options):
    """Check the right recipe with overrides; names in them stand for what lies in the folder."""
    named = [
        each.replace("model_of/", f"{folder}/").replace("data_of/", f"{folder}/")
        for each in overrides
    ]
    # Time is not what these tests are about.
    told = {"runs": folder / "runs", "limit_s": 60.0, **options}
    return check_recipe(folder / "recipe.yaml", named, **told)


def findings(report, severity):
    return [each for each in report.findings if each.severity is severity]


def text(finding):
    return "\n".join((finding.what, finding.detail, finding.cure))


def test_the_right_recipe_has_no_faults(folder):
    report = checked(folder)
    assert list(report.findings) == []
    assert report.recipe is not None


@pytest.mark.parametrize("listen", ["metrics.listen=off", "hub.listen='[::1]:0'"])
def test_what_is_listened_on_may_be_nothing_or_have_brackets(folder, listen):
    assert not checked(folder, listen).errors


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_recipe_is_refused_with_place_and_cure(folder, wrong):
    (folder / "python").touch(mode=0o755)
    report = checked(folder, *wrong.overrides)
    told = [each for each in report.errors if each.place == wrong.place]
    assert told, report.to_json()
    assert any(all(word in text(each) for word in wrong.said) for each in told), report.to_json()
    assert not any("internal error" in each.what for each in report.findings), report.to_json()


def test_forty_wrong_recipes_at_least_are_refused():
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 40


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(RECIPES.glob("*.yaml")) if path.stem != "template"]
)
def test_the_recipes_of_the_repository_pass(name, monkeypatch, tmp_path):
    monkeypatch.chdir(RECIPES)
    report = check_recipe(RECIPES / f"{name}.yaml", runs=tmp_path, limit_s=60.0)
    assert findings(report, ERROR) + findings(report, WARNING) == []


def test_the_template_is_refused_for_its_paths(tmp_path):
    report = check_recipe(RECIPES / "template.yaml", runs=tmp_path)
    assert [each.place for each in report.errors] == [
        "policies.model.model.path",
        "data.train.path",
    ]
    elsewhere = check_recipe(RECIPES / "template.yaml", runs=tmp_path, is_elsewhere=True)
    assert elsewhere.errors == []
    assert len(findings(elsewhere, NOTE)) == 2


def test_all_faults_are_told_at_once(folder):
    overrides = (
        own("NotAsync"),
        f"{TRAINER}.device=cuda:63",
        "data.held_out.path=nowhere.jsonl",
        "track=[tensorbord]",
        f"{MODEL}.path=nowhere",
    )
    places = {each.place for each in checked(folder, *overrides).errors}
    assert places == {
        f"{ANSWER}.name",
        f"{TRAINER}.device",
        "data.held_out.path",
        "track.0",
        f"{MODEL}.path",
    }


@pytest.mark.parametrize(
    ("overrides", "place", "said"),
    [
        ((data("some_long"),), "data.train", "about 3 of 23 prompts"),
        (
            ("data.held_out.path=data_of/train.jsonl",),
            "evals.held_out.data_sets.0.data_set",
            "20 of 20",
        ),
        (
            ("evals.held_out.data_sets.0.data_set=train",),
            "evals.held_out.data_sets.0.data_set",
            "trained on",
        ),
        (("evals={}",), "data.held_out", "not used"),
        ((f"{TRAINER}.optimizer.learning_rate=0.5",), f"{TRAINER}.optimizer.learning_rate", "high"),
        ((f"{TRAINER}.max_staleness=0", f"{TRAINER}.prefetch=2"), f"{TRAINER}.prefetch", "fresh"),
        ((f"{TRAINER}.buffer.max_groups=2",), f"{TRAINER}.buffer.max_groups", "less than a batch"),
        (("raas.capacity=3",), "raas.capacity", "groups are spread"),
        ((f"{TRAINER}.step_count=null",), f"{TRAINER}.step_count", "never ends"),
        (("rollouts.epochs=1", f"{TRAINER}.step_count=40"), "rollouts.epochs", "5 of 40 steps"),
        (("policies.solver.sampling.max_new_tokens=1",), "policies.solver.sampling", "is cut by"),
        ((scored("half"),), f"{ANSWER}.scorer", "scores 0.5, not 1"),
        (("hub.listen=0.0.0.0:0",), "hub.tls", "plain text"),
    ],
)
def test_what_is_likely_not_meant_is_a_warning(folder, overrides, place, said):
    report = checked(folder, *overrides)
    told = [each for each in findings(report, WARNING) if each.place == place]
    assert any(said in each.what for each in told), report.to_json()
    assert report.errors == []


def test_a_penalty_is_no_fault_in_training_but_nothing_counts_as_correct(folder):
    (fault,) = checked(folder, scored("Brief")).errors
    assert fault.place == "evals.held_out.data_sets.0.correct_reward"
    report = checked(folder, scored("Brief"), "evals.held_out.data_sets.0.correct_reward=0.9")
    assert report.errors == []
    assert [each.place for each in findings(report, WARNING)] == [f"{ANSWER}.scorer"]


def test_half_of_a_surrogate_pair_in_a_row_is_no_fault(folder):
    assert checked(folder, data("half")).errors == []


@pytest.mark.parametrize("code", [scored("faults_on_wrong"), own("FaultOnWrong")])
def test_a_fault_of_the_policy_is_an_answer_like_any_other(folder, code):
    assert list(checked(folder, code).findings) == []


def test_one_row_whose_answer_does_not_count_is_a_warning(folder):
    report = checked(folder, scored("Moody"))
    assert report.errors == []
    (told,) = findings(report, WARNING)
    assert "scores 0, not 1: 1 of 8 rows" in told.what


def test_an_answer_in_another_form_counts(folder):
    overrides = ["raas.count=0", scored("boxed")]
    assert checked(folder, *overrides).errors == []


def test_a_tiny_model_is_made_to_be_looked_at_and_left_nowhere(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = f"{MODEL}={{tiny: {{}}, warm_up: {{demonstrations: data_of/demos.jsonl}}}}"
    assert list(checked(folder, model).findings) == []
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_got_later_is_a_note(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = checked(folder, f"{MODEL}={{name: smollm2-135m}}")
    assert report.errors == []
    (told,) = report.findings
    assert (told.place, told.cure) == (f"{MODEL}.name", "astraflow models get smollm2-135m")
    report = checked(folder, f"{MODEL}={{hub: no-such-org/no-such-model}}")
    (told,) = report.findings
    assert (told.severity, told.place) == (NOTE, f"{MODEL}.hub")


def test_data_of_the_hub_is_a_note_until_it_is_here(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = checked(folder, "data.train={hub: an-org/sums}")
    (told,) = [each for each in report.findings if each.place == "data.train.hub"]
    if find_spec("datasets") is None:
        assert "datasets>=" in told.cure
    else:
        assert told.severity is NOTE


def test_tasks_that_come_from_seeds_need_no_file(folder):
    (folder / "world.py").write_text("class World:\n    pass\n", "utf-8")
    report = checked(
        folder,
        "data={train: {seeds: [0, 8]}, held_out: {seeds: [8, 12]}}",
        f"{ANSWER}={{name: environment, options: {{environment: world:World}}}}",
    )
    assert report.errors == []


@pytest.mark.parametrize(
    "advantages",
    [
        "{baseline: leave_one_out}",
        "{estimator: own_advantages:as_they_are}",
        "{agents: {judge: {baseline: none}}}",
    ],
)
def test_groups_of_one_may_have_advantages(folder, advantages):
    (folder / "own_advantages.py").write_text("def as_they_are(rewards):\n    return rewards\n")
    groups = "rollouts={group_size: 1, min_group_size: 1, data_set: train, workflow: answer}"
    report = checked(folder, groups, f"{TRAINER}.advantages={advantages}")
    assert report.errors == []


def test_what_starts_processes_is_left_to_the_run(folder):
    for override in (scored("starts_process"), own("OwnProcess")):
        report = checked(folder, override)
        assert report.errors == []
        assert any("starts processes" in each.what for each in findings(report, NOTE))


def test_what_never_ends_is_named_with_its_line_and_holds_nothing_up(folder):
    report = checked(folder, own("NeverEnds"), limit_s=0.5)
    assert any("asyncio.Event().wait()" in each.detail for each in findings(report, WARNING))
    report = checked(folder, scored("spins"), limit_s=0.5)
    assert any("in spins" in each.detail for each in findings(report, WARNING))


@pytest.mark.parametrize(
    ("scorer", "line"),
    [("exits_at_once", "os._exit(0)"), ("awaits_what_was_cancelled", "await other")],
)
def test_code_that_ends_the_process_or_its_task_is_named_with_its_line(folder, scorer, line):
    report = checked(folder, scored(scorer))
    assert any(line in each.detail for each in report.errors)


def test_a_port_that_is_taken_is_told(folder):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        report = checked(folder, f"hub.listen={listen}")
    (fault,) = report.errors
    assert (fault.place, fault.is_local) == ("hub.listen", True)
    assert listen in fault.what


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_key_has_to_be_that_of_its_certificate(folder):
    pair = "hub.tls={{certificate: data_of/one.pem, key: data_of/{}.key, ca: data_of/one.pem}}"
    assert checked(folder, pair.format("one")).errors == []
    (fault,) = checked(folder, pair.format("other")).errors
    assert fault.place == "hub.tls.key"
    assert "not that of the certificate" in fault.what


def test_a_run_that_is_live_keeps_its_name(folder, tmp_path):
    endpoint = HubEndpoint(
        address="127.0.0.1:1", pid=os.getpid(), operator_token="a", join_token="b"
    )
    RunDir(tmp_path / "sums").write_endpoint(endpoint)
    (fault,) = checked(folder, runs=tmp_path).errors
    assert fault.place == "name"
    assert "--name" in fault.cure
    assert checked(folder, "name=other", runs=tmp_path).errors == []


def test_a_folder_that_is_a_file_is_told(folder):
    (fault,) = checked(folder, runs=folder / "file").errors
    assert fault.place == "name"
    assert "is a file" in fault.what


def test_a_cache_that_cannot_be_written_is_told(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file" / "cache"))
    model = f"{MODEL}={{tiny: {{}}, warm_up: {{demonstrations: data_of/demos.jsonl}}}}"
    (told,) = checked(folder, model).findings
    assert (told.severity, told.place) == (WARNING, MODEL)
    assert "is a file" in told.what
    assert "XDG_CACHE_HOME" in told.cure
    assert list(checked(folder).findings) == []


def test_a_recipe_that_is_no_file_or_no_yaml_is_refused(folder, tmp_path):
    (fault,) = check_recipe(tmp_path / "none.yaml").errors
    assert "cannot be read" in fault.what
    twice = tmp_path / "twice.yaml"
    twice.write_text("name: a\nname: b\n")
    (fault,) = check_recipe(twice).errors
    assert "'name' is given twice" in fault.what


def test_a_check_that_fails_is_told_and_the_others_go_on(folder, monkeypatch):
    def failing(subject):
        raise RuntimeError("oh")

    monkeypatch.setattr("astraflow.launch.check.recipe._CHECKS", (failing, *_CHECKS))
    report = checked(folder, "track=[tensorbord]")
    assert any("internal error" in each.what and "oh" in each.what for each in report.errors)
    assert any(each.place == "track.0" for each in report.errors)


def test_what_depends_on_this_machine_is_a_note_elsewhere(folder):
    overrides = (
        "raas.engine={kind: vllm, python: /no/python, tensor_parallel: 8}",
        f"{MODEL}.path=/no/model",
        "data.train.path=/no/rows.jsonl",
    )
    assert len(checked(folder, *overrides).errors) >= 3
    report = checked(folder, *overrides, is_elsewhere=True)
    assert report.errors == []
    assert {"raas.engine.python", f"{MODEL}.path", "data.train.path"} <= {
        each.place for each in findings(report, NOTE)
    }


_IN_A_FRESH_PROCESS = """
import json, sys
started = []
names = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.exec")
sys.addaudithook(lambda event, _: started.append(event) if event in names else None)
from pathlib import Path
from astraflow.launch.check import check_recipe
# What is refused is heard here, too: the hooks are called in their order.
recipe, runs, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
reports = [check_recipe(recipe, overrides, runs=runs, limit_s=60.0) for overrides in cases]
refused = [bool(report.errors) for report in reports]
heavy = sorted({"torch", "transformers"} & set(sys.modules))
print(json.dumps([refused, started, heavy, sorted(each.name for each in runs.parent.iterdir())]))
"""


@pytest.mark.slow
def test_no_wrong_recipe_starts_a_process_or_loads_torch(folder, tmp_path):
    (folder / "python").touch(mode=0o755)
    # Code of the user's for tensors loads torch, and so does trying it.
    tried = [
        wrong
        for wrong in WRONG
        if not any(each.startswith(TRAINER) and "=user_code:" in each for each in wrong.overrides)
    ]
    cases = [
        [
            each.replace("model_of/", f"{folder}/").replace("data_of/", f"{folder}/")
            for each in wrong.overrides
        ]
        for wrong in tried
    ]
    arguments = (str(folder / "recipe.yaml"), str(tmp_path / "runs"), json.dumps(cases))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_FRESH_PROCESS, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    refused, started, heavy, written = json.loads(done.stdout.splitlines()[-1])
    assert refused == [True] * len(tried)
    assert (started, heavy, written) == ([], [], [])
