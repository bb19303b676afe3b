"""The codec can be read from docs/codec*.md alone: by C that shares no code with it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

SOURCES = sorted((Path(__file__).parent / "c").glob("*.c"))
VECTORS = sorted((Path(__file__).parent.parent / "codec" / "vectors").glob("*.json"))
COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
STRICT = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
REFUSED, NO_LIBRARY = 1, 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Compile it, watched by the sanitizers where the compiler has them."""
    program = tmp_path_factory.mktemp("reader") / "reader"
    for extra in (SANITIZERS, []):
        command = [COMPILER, *STRICT, *extra, "-o", program, *SOURCES, "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode == 0:
            return program
    pytest.fail(made.stderr)


def read(reader, *arguments):
    options = {"ASAN_OPTIONS": "detect_leaks=0:exitcode=99"}
    done = subprocess.run(
        [reader, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **options},
    )
    if done.returncode == NO_LIBRARY:
        pytest.skip("needs libzstd.so.1")
    return done


def test_every_committed_vector_leads_to_its_target(reader):
    done = read(reader, *VECTORS)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for path in VECTORS for word in ("ok", str(path))]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_damaged_payload_is_refused_and_breaks_nothing(reader, path, tmp_path):
    rng = np.random.default_rng(len(path.name))
    for number in range(4):
        damaged = tmp_path / f"{number}.{path.name}"
        damaged.write_text(json.dumps(damage(json.loads(path.read_text()), rng), indent=1))

        assert read(reader, damaged).stderr == "refused: a chunk has another digest\n"
        done = read(reader, "--trusting", damaged)
        assert done.returncode == REFUSED, done.stderr
        assert done.stderr.startswith("refused: ")


def damage(vector, rng):
    """Flip a bit of one payload."""
    chunk = rng.choice([each for each in vector["chunks"] if each["payload"]])
    payload = bytearray.fromhex(chunk["payload"])
    payload[rng.integers(len(payload))] ^= 1 << int(rng.integers(8))
    chunk["payload"] = payload.hex()
    return vector
