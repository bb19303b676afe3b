"""Terminus 2 of Harbor on the machine itself: an environment of a user's own, with tmux."""

# ruff: noqa: T201

import asyncio
import shutil
import tempfile
from pathlib import Path

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths


class Local(BaseEnvironment):
    """Runs commands where it is."""

    @staticmethod
    def type():
        return "local"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        pass

    async def stop(self, delete):
        await self.exec("tmux kill-server")

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    download_file = upload_file
    download_dir = upload_dir

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command), cwd=cwd or self.environment_dir, stdout=-1, stderr=-1
        )
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


async def main(folder):
    paths = TrialPaths(folder / "trial")
    paths.mkdir()
    environment = Local(folder, "task", "task__1__env", paths, EnvironmentConfig())
    agent = Terminus2(
        paths.agent_dir, model_name="openai/policy", record_terminal_session=False, max_turns=5
    )
    await agent.setup(environment)
    try:
        await agent.run("Write hi to made.txt", environment, AgentContext())
        print((folder / "made.txt").read_text())
    finally:
        await environment.stop(delete=True)


with tempfile.TemporaryDirectory() as name:
    asyncio.run(main(Path(name)))
