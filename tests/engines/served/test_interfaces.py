"""A release of a server with other interfaces than are used is named before it is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.engines.building import build_engine
from astraflow.engines.served.interfaces import (
    INTERFACES,
    Interface,
    missing_interfaces,
    require_interfaces,
)

SOURCE = """
class Client:
    version: int = 0

    async def pause(self, mode, *, clear=True): ...

    def call(self, **options): ...

if True:
    def reload(model): ...

CONSTANT = 1
PARSER = ["--option"]
"""


@pytest.mark.parametrize(
    ("name", "parameters", "missing"),
    [
        ("Client.pause", ("mode", "clear"), []),
        ("Client.pause", ("mode", "wait"), ["Client.pause in a.py with wait"]),
        ("Client.call", ("anything",), []),
        ("Client.resume", (), ["Client.resume in a.py"]),
        ("Client.version", (), []),
        ("Other.pause", (), ["Other.pause in a.py"]),
        ("reload", ("model",), []),
        ("CONSTANT", (), []),
        ('"--option"', (), []),
        ('"--other"', (), ['"--other" in a.py']),
    ],
)
def test_what_a_source_lacks_is_named(tmp_path: Path, name, parameters, missing):
    (tmp_path / "a.py").write_text(SOURCE)
    found = missing_interfaces(tmp_path, [Interface("a.py", name, parameters)])
    assert list(found) == missing


def test_a_file_that_is_gone_or_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "bad.py").write_text("def f(:")
    wanted = [Interface("gone.py", "f"), Interface("bad.py", "f")]
    assert list(missing_interfaces(tmp_path, wanted)) == ["gone.py (f)", "f in bad.py"]


def environment_of(folder: Path, kind: str, release: str) -> Path:
    """Return an interpreter whose environment has a package of that name with nothing in it."""
    package = folder / "packages" / kind
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it is not to be imported')\n")
    info = folder / "packages" / f"{kind}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {kind}\nVersion: {release}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("kind", list(INTERFACES))
def test_a_wrong_release_is_named_and_not_started(tmp_path: Path, model, kind):
    python = environment_of(tmp_path, kind, "9.8.7")
    with pytest.raises(AstraflowError, match=rf"{kind} 9\.8\.7 in .* does not have") as caught:
        build_engine(model.folder, EngineSettings(kind=kind, python=python), "sort")
    assert caught.value.reason is Reason.CAPABILITY_MISSING
    assert caught.value.exit_code == CONFIGURATION_EXIT


def test_an_environment_without_the_server_and_one_that_is_none_are_named(tmp_path: Path):
    python = environment_of(tmp_path, "vllm", "1.0")
    with pytest.raises(
        AstraflowError, match=rf"has no package sglang: {python} -m pip install 'sg"
    ):
        require_interfaces("sglang", python)
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(AstraflowError, match="is no interpreter that works"):
        require_interfaces("vllm", tmp_path / "broken")


def test_a_node_with_a_wrong_release_ends_at_once_and_would_again(tmp_path: Path, model):
    python = environment_of(tmp_path, "vllm", "9.8.7")
    engine = f"raas.engine={{kind: vllm, python: {python}, device: cpu}}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "astraflow", "raas", "join", "recipes/sort.yaml"),
            *("--hub", "127.0.0.1:9", "--model", f"solver={model.folder}", "--set", engine),
        ],
        env={**os.environ, "ASTRAFLOW_JOIN_TOKEN": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CONFIGURATION_EXIT, done.stdout + done.stderr
    assert "vllm 9.8.7" in done.stdout + done.stderr


SERVERS = [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in INTERFACES]


@pytest.mark.parametrize("kind", SERVERS)
def test_the_release_that_is_installed_has_them(kind):
    require_interfaces(kind, Path(os.environ[f"ASTRAFLOW_{kind.upper()}_PYTHON"]))
