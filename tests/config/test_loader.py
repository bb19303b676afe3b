from pathlib import Path

import pytest
import yaml

from astraflow.config.loader import dump_recipe, json_schema, load_recipe
from astraflow.config.recipe import PolicyConfig, TrainerConfig
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALL = """
name: small
policies: {solver: {model: {path: models/base}}}
data: {train: {path: rows.jsonl}}
workflows: {sort: {name: single_turn}}
rollouts: {data_set: train, workflow: sort}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def fault(path, *overrides):
    with pytest.raises(AstraflowError) as caught:
        load_recipe(path, overrides)
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_survives_saving(path, tmp_path):
    recipe = load_recipe(path)
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_recipe(recipe))
    assert load_recipe(saved) == recipe


def test_paths_start_at_the_recipes_folder(small):
    recipe = load_recipe(small)
    assert recipe.data["train"].path == small.parent / "rows.jsonl"
    assert recipe.policies["solver"].model.path == small.parent / "models" / "base"


def test_an_override_sets_one_key(small):
    recipe = load_recipe(small, ["policies.solver.trainer.step_count=7", "seed=3"])
    assert (recipe.policies["solver"].trainer.step_count, recipe.seed) == (7, 3)


def test_an_override_replaces_what_is_there(small):
    recipe = load_recipe(small, ["policies.solver.model={warm_up: {tutor: letter_sort:SortTutor}}"])
    assert recipe.policies["solver"].model.path is None


def test_an_override_reaches_into_lists():
    path = RECIPES[0].with_name("sort.yaml")
    recipe = load_recipe(path, ["evals.held_out.data_sets.0.repeats=4"])
    assert recipe.evals["held_out"].data_sets[0].repeats == 4
    assert "0 to 0" in fault(path, "evals.held_out.data_sets.1.repeats=4").message


def test_numbers_may_be_written_without_a_dot(small):
    rate = "policies.solver.trainer.optimizer.learning_rate=5e-4"
    recipe = load_recipe(small, [rate, "workflows.sort.options={x: 1e-3}"])
    assert recipe.policies["solver"].trainer.optimizer.learning_rate == 5e-4
    assert recipe.workflows["sort"].options == {"x": 1e-3}


def test_off_is_a_word_and_true_a_truth_value(small):
    recipe = load_recipe(
        small, ["raas.relay.mode=off", "policies.solver.trainer.advantages.scale_by_std=true"]
    )
    assert recipe.raas.relay.mode == "off"
    assert recipe.policies["solver"].trainer.advantages.scale_by_std is True


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sead=1", "sead: unknown key; did you mean 'seed'?"),
        ("policies.solver.trainer.stepcount=1", "did you mean 'step_count'?"),
        ("policies.solver.model.warm_up={tutr: x}", "did you mean 'tutor'?"),
        ("hub.tls.zzz=1", "unknown key; known are ca, certificate, key"),
        ("evals={e: {data_sets: [{data_zet: x}]}}", "evals.e.data_sets.0.data_zet: unknown key"),
        ("rollouts.workflow=sorted", "'sorted' is none of sort"),
        ("http={port: 0, trainers: [judge]}", "'judge' is none of solver"),
        ("http.trainers=[solver]", "give http.port"),
        ("seed=many", "seed: Input should be a valid integer"),
        ("policies.solver.sampling.temperature=.inf", "temperature: Input should be"),
        ("policies.solver.sampling.temperature=1e39", "temperature: Input should be less than"),
        ("raas.capacity=2147483648", "capacity: Input should be less than or equal to 1000000000"),
        ("rollouts.payloads={above_nbytes: 9223372036854775808}", "above_nbytes: Input should be"),
        ("policies.solver.trainer.optimizer.betas=[0.9, 1.5]", "betas.1: Input should be less"),
        ("rollouts.timeout_s=.inf", "timeout_s: Input should be less than or equal to 1000000000"),
        ("autoscale.drain_s=.inf", "drain_s: Input should be less than or equal to 1000000000"),
        ("hub.journal.lease_s=.inf", "lease_s: Input should be less than or equal to 1000000000"),
        ("rollouts.data_set={train: .nan}", "data_set.train: Input should be"),
        ("seed=-1", "seed: Input should be greater than or equal to 0"),
        ("seed=9223372036854775808", "seed: Input should be less than 9223372036854775808"),
        ("seed", "not of the form a.b=value"),
        ("name.x=1", "name: has no keys"),
        ("seed={", "not YAML"),
        ("policies.solver.trainer.steps=9", "'max_failed_steps' or 'step_count'"),
        ("policies.solver.sampling.temp=1", "did you mean 'temperature'?"),
        ("track=wandb", "track: Input should be a list, such as [a, b]"),
        ("policies.solver.trainer.loss.kl=0.1", "its keys are coefficient, estimator"),
        (
            "policies.solver.trainer.optimizer.kind=adam",
            "optimizer.kind: Input should be 'adamw' or 'muon', or: String should match",
        ),
        ("data.train.path=~nobody-of-that-name/x", "no such home"),
    ],
)
def test_what_is_wrong_is_named(small, override, said):
    assert said in fault(small, override).message


def test_every_problem_is_listed_with_its_place(small):
    error = fault(small, "sead=1", "rollouts.group_size=0")
    assert error.metadata["field"] == "rollouts.group_size,sead"
    assert len(error.message.splitlines()) == 3


def test_a_key_given_twice_is_refused(small):
    small.write_text(SMALL + "name: again\n")
    assert "'name' is given twice" in fault(small).message


def test_keys_that_an_anchor_has_are_taken_in_and_may_be_given_otherwise(small):
    small.write_text(
        SMALL.replace(
            "policies: {solver: {model: {path: models/base}}}",
            """
policies:
  solver: &solver
    model: {path: models/base}
    trainer: &trainer {step_count: 7, max_staleness: 1}
  second: {<<: *solver, trainer: {<<: *trainer, step_count: 9}}
""",
        )
    )
    policies = load_recipe(small).policies
    assert policies["second"].model == policies["solver"].model
    trainers = [policies[name].trainer for name in ("solver", "second")]
    assert [(each.step_count, each.max_staleness) for each in trainers] == [(7, 1), (9, 1)]


def test_an_override_changes_nothing_else_that_an_anchor_is(small):
    small.write_text(
        SMALL.replace(
            "policies: {solver: {model: {path: models/base}}}",
            "policies: {solver: &it {model: {path: models/base}, trainer: {step_count: 7}},"
            " second: *it}",
        )
    )
    policies = load_recipe(small, ["policies.second.trainer.step_count=9"]).policies
    assert [policies[name].trainer.step_count for name in ("solver", "second")] == [7, 9]


def test_a_text_that_looks_like_a_number_stays_one_when_it_is_saved(small):
    recipe = load_recipe(small, ['workflows.sort.options={answer: "1e3", off: "off", n: "12"}'])
    small.write_text(dump_recipe(recipe))
    assert load_recipe(small) == recipe


def test_a_file_that_is_no_recipe_is_named(small):
    small.write_text("- 1\n")
    assert "a recipe is a mapping" in fault(small).message
    assert "No such file" in fault(small.with_name("gone.yaml")).message


def test_the_schema_describes_every_field():
    properties = json_schema()["$defs"]["TrainerConfig"]["properties"]
    assert properties["max_staleness"]["description"].startswith("Versions between")


def test_a_saved_recipe_has_every_default(small):
    tree = yaml.safe_load(dump_recipe(load_recipe(small)))
    loss = tree["policies"]["solver"]["trainer"]["loss"]
    assert (loss["clip_low"], loss["clip_high"], loss["mean"]) == (0.2, 0.28, "tokens")


def test_nothing_is_broadcast_to_nodes_that_take_no_weights(small):
    broadcast = "policies.solver.trainer.broadcast={node_count: 1, port: 29500}"
    assert load_recipe(small, (broadcast,)).policies["solver"].trainer.broadcast is not None
    with pytest.raises(AstraflowError, match="none takes no weights: leave solver's broadcast out"):
        load_recipe(small, (broadcast, "raas.engine.kind=none"))


@pytest.mark.parametrize(
    "fields", [{"critic": {}}, {"loss": {"surrogate": "sft"}}, {"loss": {"surrogate": "dpo"}}]
)
@pytest.mark.parametrize("is_of_agent", [False, True])
def test_length_costs_nothing_where_advantages_of_groups_are_not_used(fields, is_of_agent):
    shaping = {"overlong": {"max_tokens": 8, "buffer_tokens": 4}}
    advantages = {"agents": {"solver": shaping}} if is_of_agent else shaping
    assert TrainerConfig.model_validate({"advantages": advantages}).critic is None
    with pytest.raises(ValueError, match=r"overlong .* not used (beside a critic|by sft|by dpo)"):
        TrainerConfig.model_validate(fields | {"advantages": advantages})


def test_ranks_share_adapters_a_critic_and_a_store_but_have_no_broadcast():
    shared = {"ranks": 2, "critic": {}, "store": "file:///shared"}
    fields = {"model": {"path": "models/base", "lora": {"rank": 2}}, "trainer": shared}
    assert PolicyConfig.model_validate(fields).trainer.ranks == 2
    broadcast = {"node_count": 1, "port": 29500}
    with pytest.raises(ValueError, match="has one sender, so it needs ranks: 1"):
        PolicyConfig.model_validate(fields | {"trainer": shared | {"broadcast": broadcast}})


@pytest.mark.parametrize(
    ("fsdp", "why"),
    [
        ({"expert_parallel": 2, "tensor_parallel": 2}, "take expert_parallel: 1 or tensor_paral"),
        ({"expert_parallel": 2, "replicas": 4}, "replicas times expert_parallel divides ranks"),
    ],
)
def test_ranks_that_cannot_share_experts_out_are_refused(fsdp, why):
    with pytest.raises(ValueError, match=why):
        TrainerConfig.model_validate({"ranks": 4, "fsdp": fsdp})


def test_code_beside_a_recipe_can_be_named(small):
    small.with_name("beside_the_recipe.py").write_text("def score(prompt, text):\n    return 1.0\n")
    recipe = load_recipe(small)
    assert recipe.code == small.parent
    assert load("beside_the_recipe:score", what="scorer")(None, "") == 1.0


@pytest.mark.parametrize(
    "knob", ["top_p=0.95", "top_k=50", "min_p=0.1", "min_new_tokens=2", "temperature=0"]
)
def test_a_policy_is_not_sampled_in_ways_that_its_trainer_cannot_score(small, knob):
    error = fault(small, f"policies.solver.sampling.{knob}")
    name = knob.partition("=")[0]
    assert f"{name} = " in error.message
    assert "evals.*.sampling" in error.message


def test_an_evaluation_is_sampled_as_it_likes(small, tmp_path):
    suite = (
        "{data_sets: [{data_set: train, workflow: sort}], sampling: {temperature: 0, top_p: 0.9}}"
    )
    recipe = load_recipe(small, [f"evals.main={suite}"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_recipe(recipe))
    for each in (recipe, load_recipe(saved)):
        assert each.evals["main"].sampling.changes == {"temperature": 0.0, "top_p": 0.9}


@pytest.mark.parametrize("value", ["{{FOLDER}}", "2026-02-30", "{? [a] : 1}"])
def test_what_yaml_itself_cannot_read_is_named(small, value):
    assert "not YAML" in fault(small, f"data.train.path={value}").message
    small.write_text(SMALL.replace("rows.jsonl", value))
    assert str(small) in fault(small).message


def test_a_key_of_an_item_of_a_schedule_is_named_among_those_that_it_has(small):
    told = fault(small, "rollouts.data_set=[{weights: {train: 1}, from_versio: 0}]").message
    assert "did you mean 'from_version'?" in told


def test_code_that_is_named_alone_takes_options(small):
    recipe = load_recipe(small, ["executor=slurm", "executor.options.partition=gpu"])
    assert (recipe.executor.name, recipe.executor.options) == ("slurm", {"partition": "gpu"})
    filters = ["rollouts.filters=[length]", "rollouts.filters.0.options.max_tokens=3"]
    assert load_recipe(small, filters).rollouts.filters[0].options == {"max_tokens": 3}
    assert "name: Input should be a valid string" in fault(small, "name.options.x=1").message
