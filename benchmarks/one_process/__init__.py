"""Training of the sort recipe in one process, without a hub."""

from pathlib import Path

from astraflow.core.code import add_code_folder

add_code_folder(Path(__file__).parents[2] / "recipes")
