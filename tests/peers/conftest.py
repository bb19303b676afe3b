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
# Builds are found again by the digest of all that they are made of; the gate keeps them here.
CACHE = Path(
    os.environ.get("ASTRAFLOW_PEERS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "astraflow")
)
VECTORS = ROOT / "tests" / "codec" / "vectors"
# Written last into the folder of a build.
BUILT = ".built"
# Where Debian keeps the sources of Go packages.
GO_PACKAGES = Path("/usr/share/gocode")
# The last is of a release that gRPC needs; there is an older one.
GO_NEEDS = [
    GO_PACKAGES / "src" / name
    for name in (
        "google.golang.org/grpc",
        "lukechampine.com/blake3",
        "github.com/klauspost/compress/zstd",
        "github.com/golang/protobuf/proto/registry.go",
    )
]
JARS = Path("/usr/share/java")
# And crates, in place of crates.io.
CRATES = Path("/usr/share/cargo/registry")
CRATE_NEEDS = ("base64-0.13", "blake3-1", "h2-0.3", "prost-build-0.11", "tokio-1", "zstd-0.12")
CRATE_SETTINGS = f"""
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "{CRATES}"
"""


@pytest.fixture(scope="session", params=["typescript", "go", "rust"])
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
        generate("typescript", built, env=searching(programs))
        run(programs / "tsc", cwd=built)
        (built / BUILT).touch()
    return {role: f"node {built / 'dist' / 'src' / role}.js" for role in ("trainer", "raas")}


@pytest.fixture(scope="session")
def go():
    needs("go", "protoc-gen-go", "protoc-gen-go-grpc", *GO_NEEDS)
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


@pytest.fixture(scope="session")
def rust():
    missing = (name for name in CRATE_NEEDS if not any(CRATES.glob(f"{name}.*")))
    needs("cargo", "protoc", "pkg-config", *missing)
    built, is_new = copied(ROOT / "tests" / "peers" / "rust", "rust")
    programs = CACHE / "rust"
    if is_new:
        (built / "crates.toml").write_text(CRATE_SETTINGS)
        # Crates are compiled once, whatever becomes of the peers.
        places = {"CARGO_TARGET_DIR": str(programs), "ASTRAFLOW_PROTOS": str(ROOT / "protos")}
        env = {**os.environ, **places, "CARGO_PROFILE_DEV_DEBUG": "0"}
        settings = ["--quiet", "--offline", "--config", "crates.toml"]
        run("cargo", "build", *settings, cwd=built, env=env)
        run("cargo", "test", "--lib", *settings, cwd=built, env=env)
        for role in ("trainer", "raas"):
            shutil.copy(programs / "debug" / role, built)
        (built / BUILT).touch()
    return {role: str(built / role) for role in ("trainer", "raas")}


@pytest.fixture(scope="session")
def cpp(tmp_path_factory):
    """Return the folder of what is generated."""
    needs("protoc", "grpc_cpp_plugin", "g++", Path("/usr/include/grpcpp/grpcpp.h"))
    folder = tmp_path_factory.mktemp("cpp")
    generate("cpp", folder)
    return folder / "gen"


@pytest.fixture(scope="session")
def java(tmp_path_factory):
    """Return the folder of what is generated."""
    needs("protoc", "javac", "grpc_java_plugin", JARS / "grpc-stub.jar", JARS / "protobuf.jar")
    folder = tmp_path_factory.mktemp("java")
    (folder / "protoc-gen-grpc-java").symlink_to(shutil.which("grpc_java_plugin"))
    generate("java", folder, env=searching(folder))
    return folder / "gen"


def needs(*tools):
    missing = [str(tool) for tool in tools if not shutil.which(tool) and not Path(tool).exists()]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (scripts/install_peer_tools.sh)")


def copied(source, language, *, below=CACHE, into="."):
    """Return the folder of a build of these sources, and whether it is still to be made."""
    templates = (ROOT / "clients").glob(f"buf.gen.{language}.yaml")
    sources = [path for path in source.rglob("*") if path.is_file()]
    protos = (ROOT / "protos").rglob("*.proto")
    built = below / f"{language}-{digest([*templates, Path(__file__), *sources, *protos])}"
    is_new = not (built / BUILT).exists()
    if is_new:
        shutil.copytree(source, built / into, dirs_exist_ok=True)
    return built, is_new


def generate(language, folder, env=None):
    template = ROOT / "clients" / f"buf.gen.{language}.yaml"
    run(BUF, "generate", "protos", "--template", template, "--output", folder, cwd=ROOT, env=env)


def searching(folder):
    """Return an environment in which its programs are found."""
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def digest(paths):
    sums = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths))
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
