"""Real runs: the `astraflow` command, its processes, its files."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest

from astraflow.config.run_dir import RunDir, read_json_lines

ROOT = Path(__file__).parents[2]
# One warm-up of sort.yaml for all tests: it takes longer to start one than to make a longer one.
WARM_UP = "policies.solver.model.warm_up.step_count=40"
SMALL = (
    "policies.solver.trainer.step_count=8",
    WARM_UP,
    "data.held_out.limit=64",
)


@dataclass
class Run:
    """One `astraflow run` in a process of its own."""

    process: subprocess.Popen[str]
    run_dir: RunDir
    output: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float = 280) -> int:
        self.output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def wait_for_steps(self, count: int) -> None:
        """Follow the run's output until so many steps are recorded."""
        while len(read_json_lines(self.run_dir.metrics)) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue

    def wait_for_log(self, name: str, words: str) -> None:
        """Follow the log of a role until it has said something."""
        while words not in self.run_dir.log(name).read_text():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                raise AssertionError(self.process.communicate()[0])

    def children(self, role: str) -> list[psutil.Process]:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in processes if role in process.cmdline()]

    @property
    def summary(self) -> dict[str, object]:
        return json.loads(self.run_dir.summary.read_text())

    @property
    def books(self) -> list[dict[str, object]]:
        return json.loads(self.run_dir.status.read_text())["books"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "astraflow", *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "NO_COLOR": "1", "COLUMNS": "160"}


def astraflow(
    *arguments: str, cache: Path, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-up models are made once for all tests."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def started(
    recipe: str,
    *overrides: str,
    runs: Path,
    cache: Path,
    name: str = "test",
    is_checked: bool = True,
) -> Iterator[Run]:
    """Start a run; whatever the test does, none of its processes outlives it.

    A run that is not checked starts with faults that `astraflow check` refuses.
    """
    sets = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
    path = str(ROOT / "recipes" / recipe)
    arguments = ("run", path, "--runs", str(runs), "--name", name, *sets)
    flags = () if is_checked else ("--no-check",)
    with running(*arguments, *flags, run_dir=RunDir(runs / name), cache=cache) as run:
        yield run


@contextmanager
def running(*arguments: str, run_dir: RunDir, cache: Path) -> Iterator[Run]:
    """Run a command that runs a recipe; none of its processes outlives the block."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Run(process=process, run_dir=run_dir)
    try:
        yield run
        family = psutil.Process(process.pid).children(recursive=True) if run.is_alive else []
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=100)
    assert not alive, f"left running: {alive}"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Run, dict[str, str]]:
    """A run of sort.yaml that went to its end, and what its roles measured on the way."""
    scraped: dict[str, str] = {}
    runs = tmp_path_factory.mktemp("runs")
    sets = ("tracing.exporter=file", "raas.count=1")
    with started("sort.yaml", *sets, runs=runs, cache=cache) as run:
        run.wait_for_steps(2)
        for log in (run.run_dir.root / "logs").iterdir():
            found = re.search(r"url=(http://\S+/metrics)", log.read_text())
            if found:
                scraped[log.stem] = scrape(found[1])
        assert run.wait() == 0, run.output
    return run, scraped


def scrape(url: str) -> str:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.read().decode()
    except URLError:
        return ""
