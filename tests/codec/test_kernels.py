"""All levels of the kernels agree, byte by byte, whichever compiler made them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from astraflow.codec import kernels

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "astraflow" / "codec"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Ends at what is undefined without a word: those take as long to compile as all the rest, and the
# longer tests have them.
SILENT = (*SANITIZED, "-fsanitize-undefined-trap-on-error")
# Needs no library of the compiler's, which an emulated program, or a bare clang, does not have.
TRAPPED = ("-O2", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


def fuzz(compiler, flags, folder, rounds, *, runner=(), seed=1):
    """Compile the comparison of all levels and run it; return the levels that it compared."""
    if missing := [each for each in (compiler, *runner) if shutil.which(each) is None]:
        pytest.skip(f"needs {missing[0]}")
    program, source = folder / "fuzz_kernels", HERE / "fuzz_kernels.c"
    built = (compiler, "-std=c11", *flags, f"-I{SOURCES}", source, "-o", program)
    subprocess.run(built, check=True)
    command = (*runner, program, str(rounds), str(seed))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(each) for each in done.stdout.split("levels")[1].split()}


@pytest.fixture
def here():
    return {int(each) for each in kernels.levels() if each >= 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags", "rounds"),
    # Optimised, what is sanitized takes longer to compile than to run.
    [
        ("gcc", ("-O0", *SILENT), 150),
        pytest.param("gcc", ("-O1", "-g", *SANITIZED), 500, marks=pytest.mark.long),
        pytest.param("clang", TRAPPED, 500, marks=pytest.mark.long),
    ],
)
def test_levels_agree_on_random_and_on_damaged_input(compiler, flags, rounds, tmp_path, here):
    assert fuzz(compiler, flags, tmp_path, rounds) == here


@pytest.mark.slow
def test_the_level_of_arm_agrees_with_the_portable_one(tmp_path):
    compiler, flags = "aarch64-linux-gnu-gcc", (*TRAPPED, "-static")

    levels = fuzz(compiler, flags, tmp_path, 300, runner=("qemu-aarch64",))

    assert levels == {kernels.KernelLevel.PORTABLE, kernels.KernelLevel.NEON}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
def test_levels_agree_for_long(seed, tmp_path, here):
    assert fuzz("gcc", ("-O1", "-g", *SANITIZED), tmp_path, 20_000, seed=seed) == here
