"""The TypeScript peers, built as `docs/clients.md` says and kept while nothing changes."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "tests" / "peers" / "typescript"
# Beside the interpreter, activated or not.
BUF = Path(sys.executable).parent / "buf"
TEMPLATE = ROOT / "clients" / "buf.gen.typescript.yaml"


@pytest.fixture(scope="session")
def typescript():
    """Return the folder of the compiled peers: trainer.js and raas.js."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    packages = Path(base, "astraflow", f"peers-{digest(SOURCE.glob('package*.json'))}")
    # npm writes it last.
    if not (packages / "node_modules" / ".package-lock.json").exists():
        install(packages)
    sources = (path for path in SOURCE.rglob("*") if path.is_file())
    built = packages / digest([TEMPLATE, *sources, *(ROOT / "protos").rglob("*.proto")])
    if not (built / "dist").exists():
        build(built, packages / "node_modules" / ".bin")
    return built / "dist" / "src"


def digest(paths):
    sums = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths))
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def install(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for path in SOURCE.glob("package*.json"):
        shutil.copy(path, folder)
    run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)


def build(folder, programs):
    """Compile in a folder below that of the packages, where both tools find them."""
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    template = ["--template", TEMPLATE, "--output", folder]
    run(BUF, "generate", *template, cwd=ROOT, env={**os.environ, "PATH": path})
    run(programs / "tsc", cwd=folder)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
