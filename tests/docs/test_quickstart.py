"""The quick starts, as they stand there: real hub, real trainer, a RaaS in each language."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crash_ends.postgres import free_port

ROOT = Path(__file__).parents[2]
GO_PACKAGES = Path("/usr/share/gocode")
TOOLS = {
    "typescript": ["node", "npm"],
    "go": ["go", "protoc-gen-go", "protoc-gen-go-grpc"],
}
PREAMBLE = """set -euo pipefail
go() { [ "$1" = mod ] || command go "$@"; }  # no proxy: Debian's packages
"""

# Go compiles all of gRPC first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "language",
    [
        "python",
        *(pytest.param(name, marks=[pytest.mark.peers, pytest.mark.long]) for name in TOOLS),
    ],
)
def test_a_raas_of_ones_own_makes_the_policy_learn(blocks, language, tmp_path):
    needs(language)
    commands = write(blocks("quickstart.md"), free_port(), tmp_path)
    # Where Go looks for the module without a proxy.
    module = tmp_path / "path" / "src" / "example.com" / "astraflow"
    module.mkdir(parents=True)
    (tmp_path / "letters-go").symlink_to(module)

    said = play(PREAMBLE + commands["run"] + commands[language], tmp_path)

    rewards = [float(share) for share in re.findall(r", (\d\.\d\d) vowels", said)]
    assert sum(rewards[:5]) / 5 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.8
    status = json.loads((tmp_path / "runs" / "letters" / "status.json").read_text())
    assert status["state"] == "done"


def needs(language):
    missing = [tool for tool in TOOLS.get(language, ()) if not shutil.which(tool)]
    if language == "go" and not (GO_PACKAGES / "src" / "lukechampine.com").is_dir():
        missing.append("Debian's Go packages")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (scripts/install_peer_tools.sh)")


def write(found, port, folder):
    """Write the files that the page shows; return the commands by their title."""
    commands = {}
    for kind, title, code in found:
        told = code.replace("7070", str(port))
        if kind == "bash":
            commands[title] = told
        elif title:
            (folder / title).write_text(told, encoding="utf-8")
    return commands


def play(script, folder):
    """Return what it prints, once all that it started has ended."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    without_proxy = {"GO111MODULE": "off", "GOPATH": f"{folder / 'path'}:{GO_PACKAGES}"}
    started = subprocess.Popen(
        ["bash", "-c", f"{script}\nwait"],
        cwd=folder,
        env={**os.environ, "ASTRAFLOW": str(ROOT), "PATH": path, **without_proxy},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, error = started.communicate(timeout=800)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert started.returncode == 0, f"{error}\n{logs}"
    return said
