"""The peers in other languages, built as `docs/clients.md` says and kept while nothing changes."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Beside the interpreter, activated or not.
BUF = Path(sys.executable).parent / "buf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "astraflow")
VECTORS = ROOT / "tests" / "codec" / "vectors"
# Written last into the folder of a build.
BUILT = ".built"
# Where Debian keeps the sources of Go packages.
GO_PACKAGES = Path("/usr/share/gocode")


@pytest.fixture(scope="session", params=["typescript", "go"])
def peers(request):
    """Return the command of each role in a language, less its arguments."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def typescript():
    needs("node", "npm")
    source = ROOT / "tests" / "peers" / "typescript"
    packages = CACHE / f"peers-{digest(source.glob('package*.json'))}"
    # npm writes it last.
    if not (packages / "node_modules" / ".package-lock.json").exists():
        packages.mkdir(parents=True, exist_ok=True)
        for path in source.glob("package*.json"):
            shutil.copy(path, packages)
        run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=packages)
    programs = packages / "node_modules" / ".bin"
    # Below the packages, where both tools find them.
    built, is_new = copied(source, "typescript", below=packages)
    if is_new:
        search = f"{programs}{os.pathsep}{os.environ['PATH']}"
        generate("typescript", built, env={**os.environ, "PATH": search})
        run(programs / "tsc", cwd=built)
        (built / BUILT).touch()
    return {role: f"node {built / 'dist' / 'src' / role}.js" for role in ("trainer", "raas")}


@pytest.fixture(scope="session")
def go():
    needs("go", "protoc-gen-go", "protoc-gen-go-grpc", GO_PACKAGES / "src" / "google.golang.org")
    source = ROOT / "tests" / "peers" / "go"
    module = Path("src", "example.com", "astraflow")
    built, is_new = copied(source, "go", into=module)
    if is_new:
        generate("go", built / module)
        modes = {"GO111MODULE": "off", "GOPATH": f"{built}:{GO_PACKAGES}", "GOFLAGS": ""}
        env = {**os.environ, **modes, "ASTRAFLOW_VECTORS": str(VECTORS)}
        run("go", "test", "./weights", cwd=built / module, env=env)
        run("go", "build", "-o", f"{built / 'bin'}/", "./cmd/...", cwd=built / module, env=env)
        (built / BUILT).touch()
    return {role: str(built / "bin" / role) for role in ("trainer", "raas")}


def needs(*tools):
    missing = [str(tool) for tool in tools if not shutil.which(tool) and not Path(tool).is_dir()]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (scripts/install_peer_tools.sh)")


def copied(source, language, *, below=CACHE, into="."):
    """Return the folder of a build of these sources, and whether it is still to be made."""
    template = ROOT / "clients" / f"buf.gen.{language}.yaml"
    sources = [path for path in source.rglob("*") if path.is_file()]
    protos = (ROOT / "protos").rglob("*.proto")
    built = below / f"{language}-{digest([template, Path(__file__), *sources, *protos])}"
    is_new = not (built / BUILT).exists()
    if is_new:
        shutil.copytree(source, built / into, dirs_exist_ok=True)
    return built, is_new


def generate(language, folder, env=None):
    template = ROOT / "clients" / f"buf.gen.{language}.yaml"
    run(BUF, "generate", "--template", template, "--output", folder, cwd=ROOT, env=env)


def digest(paths):
    sums = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths))
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
