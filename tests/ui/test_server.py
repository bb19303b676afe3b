"""What the page is told of a run, and who is told."""

import asyncio
import json
import os
import shutil

import httpx
import pytest

from astraflow.config.loader import dump_recipe
from astraflow.config.run_dir import HubEndpoint, read_json_lines
from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import small_recipe, start_run
from astraflow.ui.server import serve_page, shown_runs

RUN = "/api/runs/small"


async def test_a_run_is_told_with_its_metrics_and_its_policies(recorded, serve):
    async with serve(recorded) as page:
        (run,) = (await page.get("/api/runs")).json()["runs"]
    assert (run["key"], run["policies"], run["last_steps"]) == ("small", ["solver"], {"solver": 4})
    assert "reward/mean" in run["metrics"]
    assert not run["is_live"]


async def test_a_curve_is_the_column_of_metrics_with_how_far_a_mean_may_be_off(recorded, serve):
    async with serve(recorded) as page:
        curve = (await page.get(f"{RUN}/curves/reward/mean")).json()["solver"]
    rows = read_json_lines(recorded / "metrics.jsonl")
    assert curve["value"] == [row["reward/mean"] for row in rows]
    # 1.96 standard errors of the 8 rollouts of a step.
    assert curve["error"] == pytest.approx([1.96 * row["reward/std"] / 8**0.5 for row in rows])


async def test_a_number_that_is_not_finite_is_told_as_none(recorded, serve, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "small")
    metrics = folder / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines()
    lines = [first.replace("{", '{"train/loss":NaN,"train/ratio":Infinity,', 1), *others]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    async with serve(folder) as page:
        text = (await page.get(f"{RUN}/steps/solver/1")).text
    told = json.loads(text, parse_constant=pytest.fail)["metrics"]
    assert (told["train/loss"], told["train/ratio"]) == (None, None)


async def test_a_step_leads_to_the_rollouts_that_it_trained_on(recorded, serve):
    async with serve(recorded) as page:
        steps = [(await page.get(f"{RUN}/steps/solver/{n}")).json() for n in (1, 2, 3, 4)]
        seen = 0
        for step in steps:
            rows = step["batch"]["rows"]
            assert len(rows["rollout_id"]) == 8
            for row, rollout_id in enumerate(rows["rollout_id"]):
                if not rows["is_recorded"][row]:
                    continue
                seen += 1
                rollout = (await page.get(f"{RUN}/rollouts/{rollout_id}")).json()
                place, group = rollout["place"], step["batch"]["groups"][rows["group"][row]]
                assert (place["step"], place["row"]) == (step["step"], row)
                assert rollout["trained"] == [
                    {
                        "policy": "solver",
                        "step": step["step"],
                        "row": row,
                        "trajectory": 0,
                        "advantage": rows["advantage"][row],
                    }
                ]
                assert place["advantage"] == rows["advantage"][row]
                assert rollout["reward"] == pytest.approx(rows["reward"][row], rel=1e-5)
                assert rollout["prompt_id"] == group["prompt_id"]
                assert rollout["member"] == step["batch"]["members"][rows["member"][row]]
                (trajectory,) = rollout["trajectories"]
                assert trajectory["version_spans"] == rows["version_spans"][row]
                assert len(trajectory["logprobs"]) == sum(trajectory["sampled_mask"])
                assert len(trajectory["pieces"]) == len(trajectory["tokens"])
                assert len(rollout["group"]) == 4
    assert seen
    assert (steps[0]["before"], steps[0]["after"], steps[-1]["after"]) == (None, 2, None)


async def test_rollouts_are_sorted_and_chosen_by_the_server(recorded, serve):
    async with serve(recorded) as page:

        async def find(**query):
            return (await page.get(f"{RUN}/rollouts", params=query)).json()

        everything = await find(sort="reward")
        rewards = [row["reward"] for row in everything["rows"]]
        assert rewards == sorted(rewards)
        assert everything["found"] == everything["total"] == len(rewards)
        middle = rewards[len(rewards) // 2]
        high = await find(**{"sort": "-reward", "reward.min": middle})
        assert [row["reward"] for row in high["rows"]] == sorted(
            (each for each in rewards if each >= middle), reverse=True
        )
        some = await find(sort="reward", offset=2, limit=3)
        assert some["rows"] == everything["rows"][2:5]
        node = everything["words"]["member"][0]
        assert {row["member"] for row in (await find(member=node))["rows"]} == {node}
        one = everything["rows"][0]
        assert one in (await find(text=one["group"]))["rows"]
        untrained = [row for row in (await find(sort="-step"))["rows"] if row["step"] is None]
        assert (await find(sort="-step"))["rows"][len(rewards) - len(untrained) :] == untrained


async def test_what_cannot_be_asked_is_refused_by_its_name(recorded, serve):
    async with serve(recorded) as page:
        for path, said in {
            f"{RUN}/rollouts?sort=colour": "colour",
            f"{RUN}/rollouts?reward.min=much": "much",
            f"{RUN}/rollouts?offset=inf": "inf",
            f"{RUN}/rollouts/nobody/1": "nobody/1",
            f"{RUN}/steps/solver/77": "77",
            "/api/runs/other/evals": "other",
        }.items():
            answer = await page.get(path)
            assert answer.status_code == 404
            assert said in answer.json()["error"]


async def test_books_and_timeline_are_those_of_the_hub(recorded, serve):
    async with serve(recorded) as page:
        status = (await page.get(f"{RUN}/status")).json()
        timeline = (await page.get(f"{RUN}/timeline")).json()
    assert [account["balanced"] for account in status["books"]] == [True]
    assert timeline["trainers"]["solver"]["step"] == [1, 2, 3, 4]
    assert set(timeline["versions"]["member"]) <= {each["member_id"] for each in status["members"]}


async def test_a_live_run_is_told_by_its_hub(serve, tmp_path):
    run_dir = tmp_path / "live"
    recipe = small_recipe(tmp_path)
    async with start_run(recipe, run_dir=run_dir) as hub:
        tokens = {"operator_token": hub.operator_token, "join_token": hub.join_token}
        endpoint = HubEndpoint(address=hub.address, pid=os.getpid(), **tokens)
        hub.run_dir.write_endpoint(endpoint)
        (run_dir / "recipe.yaml").write_text(dump_recipe(recipe))
        async with serve(run_dir) as page:
            (run,) = (await page.get("/api/runs")).json()["runs"]
            status = (await page.get("/api/runs/live/status")).json()
    assert (run["is_live"], run["state"]) == (True, "live")
    assert [wait["cause"] for wait in status["waits"]][:1] == ["no_trainer"]
    assert [account["balanced"] for account in status["books"]] == [True]


async def test_what_a_run_writes_meanwhile_is_read_on(recorded, serve, tmp_path):
    growing = tmp_path / "small"
    (growing / "rollouts").mkdir(parents=True)
    (growing / "recipe.yaml").write_text((recorded / "recipe.yaml").read_text())
    names = ("metrics.jsonl", "batches.jsonl", "rollouts/solver.jsonl")
    lines = {name: (recorded / name).read_text().splitlines(keepends=True) for name in names}

    def write(name, count, torn=""):
        (growing / name).write_text("".join(lines[name][:count]) + torn)

    for name in names:
        write(name, 1, torn=lines[name][1][:40])
    (run,) = shown_runs([growing])
    run.index()
    assert len(run.rollouts) == 1
    assert len(run.curves("reward/mean")["solver"]["step"]) == 1
    for name in names:
        write(name, None)
    run.index()
    assert len(run.rollouts) == len(lines["rollouts/solver.jsonl"])
    assert run.head()["last_steps"] == {"solver": 4}
    assert all(row["step"] for row in run.rollouts.rows(range(1)))


async def test_a_run_that_takes_the_place_of_another_is_shown_in_its_place(
    recorded, serve, tmp_path
):
    folder = tmp_path / "small"
    shutil.copytree(recorded, folder)

    async def told(page, steps):
        async with asyncio.timeout(30):
            while (head := (await page.get("/api/runs")).json()["runs"][0])["last_steps"] != steps:
                pass
        return head

    async with serve(folder, recorded) as page:
        await told(page, {"solver": 4})
        # As `astraflow run` does with a folder that is there.
        folder.rename(tmp_path / "small.before")
        (other,) = (await page.get("/api/runs")).json()["runs"]
        assert other["key"] == "small-2"
        folder.mkdir()
        shutil.copy(recorded / "recipe.yaml", folder)
        assert (await told(page, {}))["key"] == "small"
        assert (await page.get(f"{RUN}/rollouts")).json()["total"] == 0
        shutil.copytree(recorded, folder, dirs_exist_ok=True)
        await told(page, {"solver": 4})
        assert (await page.get(f"{RUN}/steps/solver/4")).json()["batch"]["step"] == 4


async def test_a_step_that_was_undone_is_shown_no_more_and_its_rollouts_as_untrained(
    recorded, serve, tmp_path
):
    undone = tmp_path / "small"
    (undone / "rollouts").mkdir(parents=True)
    (undone / "recipe.yaml").write_text((recorded / "recipe.yaml").read_text())
    for name in ("metrics.jsonl", "batches.jsonl", "rollouts/solver.jsonl"):
        lines = (recorded / name).read_text().splitlines(keepends=True)
        # The trainer came back at step 2, and has done step 3 again: on what step 4 had.
        again = [] if name.startswith("rollouts") else [lines[3].replace('"step":4', '"step":3')]
        (undone / name).write_text("".join(lines + again))
    before = [json.loads(line) for line in (recorded / "batches.jsonl").read_text().splitlines()]
    async with serve(undone) as page:
        (head,) = (await page.get("/api/runs")).json()["runs"]
        rows = (await page.get(f"{RUN}/steps/solver/3")).json()["batch"]["rows"]
        gone = await page.get(f"{RUN}/steps/solver/4")
        found = (await page.get(f"{RUN}/rollouts")).json()["rows"]
        told = {
            each["id"]: (await page.get(f"{RUN}/rollouts/{each['id']}")).json()["trained"]
            for each in found
        }
    assert head["last_steps"] == {"solver": 3}
    assert gone.status_code == 404
    assert rows["rollout_id"] == before[3]["rows"]["rollout_id"]
    lost = set(before[2]["rows"]["rollout_id"])
    steps = {each["id"]: each["step"] for each in found}
    assert {steps[each] for each in lost & steps.keys()} <= {None}
    assert all(told[each] == [] for each in lost & told.keys())
    assert {mark["step"] for marks in told.values() for mark in marks} <= {1, 2, 3}


async def test_a_step_that_the_hub_of_a_live_run_does_not_count_is_not_shown(tmp_path):
    recipe = small_recipe(tmp_path)
    async with start_run(recipe, run_dir=tmp_path / "live") as hub:
        tokens = {"operator_token": hub.operator_token, "join_token": hub.join_token}
        endpoint = HubEndpoint(address=hub.address, pid=os.getpid(), **tokens)
        hub.run_dir.write_endpoint(endpoint)
        hub.run_dir.recipe.write_text(dump_recipe(recipe))
        row = {"time": "2026-01-01T00:00:00+00:00", "policy": "solver", "version": 0, "step": 1}
        hub.run_dir.metrics.write_text(json.dumps(row) + "\n")
        (run,) = shown_runs([hub.run_dir.root])
        assert run.head()["last_steps"] == {"solver": 1}
        await run.cut()
        assert run.head()["last_steps"] == {}


async def test_rollouts_are_found_while_others_are_read(recorded, tmp_path):
    growing = tmp_path / "small"
    (growing / "rollouts").mkdir(parents=True)
    (growing / "recipe.yaml").write_text((recorded / "recipe.yaml").read_text())
    line = (recorded / "rollouts/solver.jsonl").read_text().splitlines()[0]
    name = json.loads(line)["rollout_id"]
    lines = (line.replace(name, f"{name}-{at}") for at in range(20_000))
    (growing / "rollouts/solver.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = shown_runs([growing])
    reading = asyncio.create_task(asyncio.to_thread(run.index))
    while not reading.done():
        found = await asyncio.to_thread(run.find_rollouts, {"sort": "-reward", "limit": "1"})
        assert found["found"] <= found["total"]
    await reading
    assert len(run.rollouts) == 20_000


async def test_only_who_has_the_key_is_let_in_and_only_by_a_name_of_this_machine(recorded):
    async with serve_page(shown_runs([recorded])) as url, httpx.AsyncClient() as client:
        base = url.split("?")[0]
        assert (await client.get(f"{base}api/runs")).status_code == 403
        assert (await client.get(f"{base}?key=guess")).status_code == 403
        entered = await client.get(url)
        assert entered.status_code == 307
        elsewhere = {"host": "evil.example:80"}
        assert (await client.get(f"{base}api/runs", headers=elsewhere)).status_code == 403
        answer = await client.get(base)
        assert answer.status_code == 200
        assert "script-src 'self';" in answer.headers["content-security-policy"]
        assert (await client.get(f"{base}../server.py")).status_code == 404


async def test_runs_of_one_name_are_told_apart(recorded, serve, tmp_path):
    other = tmp_path / "small"
    other.mkdir()
    (other / "recipe.yaml").write_text(
        (recorded / "recipe.yaml").read_text().replace("seed: 0", "seed: 1")
    )
    async with serve(recorded, other) as page:
        told = (await page.get("/api/runs")).json()
    assert [run["key"] for run in told["runs"]] == ["small", "small-2"]
    assert told["differences"]["seed"] == [0, 1]


def test_a_folder_of_no_run_is_refused(tmp_path):
    with pytest.raises(AstraflowError, match="no folder of a run") as raised:
        shown_runs([tmp_path])
    assert raised.value.reason is Reason.NOT_READY
