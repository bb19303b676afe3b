"""What pyproject.toml cannot say: C extensions that may be missing, and recipes in wheels.

Without a C compiler the install goes on, and numpy does their work, with a warning of the codec.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Puts `recipes/` into the package that is built: `astraflow init` copies from there."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "astraflow" / "recipes"
        shutil.rmtree(target, ignore_errors=True)
        left_out = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree("recipes", target, ignore=left_out)


flags = ["/O2"] if sys.platform == "win32" else ["-O3", "-std=c11", "-g0"]
parts = ("body", "classes", "common", "fast", "levels", "planes", "rans", "ranks", "tokens")

setup(
    cmdclass={"build_py": BuildWithRecipes},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "astraflow.codec._kernels",
            ["astraflow/codec/_kernels.c"],
            depends=[f"astraflow/codec/_kernels_{part}.h" for part in parts],
            extra_compile_args=flags,
            py_limited_api=True,
            optional=True,
        ),
        *(
            Extension(
                f"astraflow.{package}.{name}",
                [f"astraflow/{package}/{name}.c"],
                extra_compile_args=flags,
                py_limited_api=True,
                optional=True,
            )
            for package, name in (("core", "_arrays"), ("core", "_frozen"), ("wire", "_rollouts"))
        ),
    ],
)
