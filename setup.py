"""The one thing that pyproject.toml cannot say: C extensions that may be missing.

Without a C compiler the install goes on, and numpy does their work, with a warning of the codec.
"""

import sys

from setuptools import Extension, setup

flags = ["/O2"] if sys.platform == "win32" else ["-O3", "-std=c11"]
parts = ("body", "classes", "common", "fast", "levels", "planes", "rans", "ranks", "tokens")

setup(
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
            for package, name in (("core", "_arrays"), ("wire", "_rollouts"))
        ),
    ],
)
