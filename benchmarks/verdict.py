"""The end of a benchmark that has a bar: its JSON file, and exit code 1 when it was missed."""

import json
from pathlib import Path
from typing import Any, NoReturn


def conclude(measured: dict[str, Any], path: Path | None) -> NoReturn:
    """Write what was measured, and leave; `holds` in it says whether the bar was met.

    Raises:
        SystemExit: Always.
    """
    if path is not None:
        path.write_text(json.dumps(measured, indent=1) + "\n")
    raise SystemExit(0 if measured["holds"] else 1)
