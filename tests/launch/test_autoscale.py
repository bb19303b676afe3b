"""What starts nodes and cleans up after them: the executor of a run, and shell commands."""

import pytest

from astraflow.client.control import ControlClient
from astraflow.config.recipe import Gpus
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.autoscale import ExecutorStarter, ShellStarter, _Loop, fill
from astraflow.launch.gpus import plan_gpus
from astraflow.launch.processes import LocalExecutor, RoleCommand, Roles
from astraflow.rpc.access import HubTokens
from astraflow.testing import small_recipe, start_run


class WatchedExecutor(LocalExecutor):
    """Keeps what it has started."""

    async def start(self, command: RoleCommand, *, on_line=None):
        self.last = await super().start(command, on_line=on_line)
        return self.last


async def test_a_node_that_died_is_told_of_and_its_gpus_are_free_again(tmp_path, capsys):
    recipe = small_recipe(tmp_path, scorer="exact")
    roles = Roles(
        recipe=recipe,
        run_dir=RunDir(tmp_path / "no-recipe"),
        tokens=HubTokens.generate(),
        models={},
        gpus=plan_gpus((), Gpus(), names=("0",)),
    )
    executor = WatchedExecutor()
    starter = ExecutorStarter(roles, executor, hub="127.0.0.1:1")
    await starter.start("auto-1")
    with pytest.raises(AstraflowError, match="takes 1 GPUs, and of 1 0 are free"):
        await starter.start("auto-2")
    assert await executor.last.wait() == 1
    await starter.start("auto-2")
    await starter.close()
    told = capsys.readouterr().err
    assert "auto-1 ended with exit code 1:" in told
    assert "no-recipe" in told


def shell(tmp_path, start, stop=None):
    values = {"hub": "h:1", "recipe": "a b.yaml", "run": str(tmp_path)}
    return ShellStarter(start=start, stop=stop, join_token="secret", values=values)


def test_placeholders_are_quoted():
    assert fill("go {name} {{x}}", {"name": "a; rm b"}) == "go 'a; rm b' {x}"


def test_an_unknown_placeholder_is_named():
    with pytest.raises(AstraflowError) as refused:
        fill("go {who}", {"name": "a"})
    assert refused.value.reason is Reason.INVALID_FIELD
    assert "{name}" in refused.value.message


async def test_a_start_command_gets_the_join_token(tmp_path):
    executor = shell(tmp_path, 'echo {name} "$ASTRAFLOW_JOIN_TOKEN" {recipe} > {run}/said')
    await executor.start("n-1")
    assert (tmp_path / "said").read_text() == "n-1 secret a b.yaml\n"


async def test_a_stop_command_cleans_up(tmp_path):
    executor = shell(tmp_path, "true", stop="touch {run}/{name}")
    await executor.stop("n-1")
    assert (tmp_path / "n-1").exists()


async def test_a_command_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(AstraflowError) as failed:
        await shell(tmp_path, "echo no quota; exit 3").start("n-1")
    assert failed.value.reason is Reason.NOT_READY
    assert "no quota" in failed.value.message


def loop_of(control, starter, run_dir, patience_s=30.0, **options):
    return _Loop(
        control=control,
        starter=starter,
        run_dir=run_dir,
        patience_s=patience_s,
        drain_s=None,
        as_json=False,
        **options,
    )


async def test_a_hub_that_died_is_waited_for_as_members_do_and_told_of_when_it_is_lost(
    tmp_path, capsys
):
    run_dir, starter = RunDir(tmp_path), shell(tmp_path, "true")
    run_dir.write_endpoint(
        HubEndpoint(address="127.0.0.1:1", pid=1, operator_token="o", join_token="j")
    )
    async with ControlClient.of(run_dir, patience_s=0.01) as control:
        assert await loop_of(control, starter, run_dir)._step()
        assert not await loop_of(control, starter, run_dir, patience_s=-1.0)._step()
        assert "the hub is lost" in capsys.readouterr().err
        run_dir.endpoint.unlink()
        assert not await loop_of(control, starter, run_dir)._step()
    assert not capsys.readouterr().err


async def test_what_a_command_says_is_shown_as_it_is(tmp_path, capsys):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"autoscale.min": 3})
    starter = shell(tmp_path, "echo cannot open [/dev/nvidia0]; exit 1")
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        control = await run.control()
        loop = loop_of(control, starter, run.run_dir)
        assert await loop._step()
    assert capsys.readouterr().err.count("[/dev/nvidia0]") == 6


async def test_advice_to_leave_a_pool_as_it_is_names_one_size(tmp_path, capsys):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"autoscale.min": 0})
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        loop = loop_of(await run.control(), shell(tmp_path, "true"), run.run_dir)
        assert await loop._step()
    assert "hold at 0 nodes: " in capsys.readouterr().out


async def test_a_maintainer_that_is_started_again_takes_no_name_of_a_node_from_before(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"autoscale.min": 3})
    starter = shell(tmp_path, "echo {name} >> {run}/names")
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        for _ in range(2):
            # Of one process number, as two lives of a container have it.
            assert await loop_of(await run.control(), starter, run.run_dir)._step()
    names = (tmp_path / "names").read_text().split()
    assert len(set(names)) == len(names) == 6


class SetClock(ManualClock):
    """A machine's clock that somebody sets; no time passes."""

    def monotonic(self):
        return 0.0


async def test_nodes_on_their_way_are_not_given_up_when_the_clock_is_set_forward(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"autoscale.min": 3})
    starter, machine = shell(tmp_path, "echo {name} >> {run}/names"), SetClock()
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        loop = loop_of(await run.control(), starter, run.run_dir, machine=machine)
        assert await loop._step()
        machine.advance(3600)
        assert await loop._step()
    assert len((tmp_path / "names").read_text().split()) == 3
