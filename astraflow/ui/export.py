"""One run as a folder of files that a browser opens without a server.

A page that is opened as a file may fetch nothing and import no module of a file. So the modules
are in the page itself, under names of an import map, and every answer of the server is a script
that hands it over.
"""

import asyncio
import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from astraflow.core.errors import AstraflowError, Reason
from astraflow.ui.server import WEB, overview
from astraflow.ui.shown_run import ShownRun

MAX_ROLLOUTS: Final = 2000

_IMPORT: Final = re.compile(r'from "\./([\w-]+\.js)"')
_PRELOAD: Final = re.compile(r'<link rel="modulepreload"[^>]*>\n')
_START: Final = 'import { start } from "page/app.js"; start({ isExport: true });'
_MODULE: Final = '<script type="module" src="main.js"></script>'


async def export_page(run: ShownRun, folder: Path) -> int:
    """Write the page of a run into a folder; return how many rollouts it has, the newest ones.

    Raises:
        AstraflowError: INVALID_FIELD when the folder has something else in it.
    """
    return await asyncio.to_thread(_write, run, folder, await run.status())


def _write(run: ShownRun, folder: Path, status: Any) -> int:
    index = folder / "index.html"
    # What lies in `data` beside a page of somebody else's would be removed.
    is_export = index.exists() and _START in index.read_text(encoding="utf-8", errors="replace")
    if folder.exists() and any(folder.iterdir()) and not is_export:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{folder} is not empty; give --export a folder of its own"
        )
    run.index()
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    shutil.copytree(WEB / "vendor", folder / "vendor", dirs_exist_ok=True)
    for name in ("app.css", "favicon.svg", "theme.js"):
        shutil.copy(WEB / name, folder / name)
    index.write_text(_page(), encoding="utf-8")
    newest = run.find_rollouts({"limit": str(MAX_ROLLOUTS), "sort": "-time"})
    ids = [row["id"] for row in newest["rows"]]
    place = f"runs/{run.key}"
    for path, content in (
        ("runs", overview([run])),
        (f"{place}/status", status),
        (f"{place}/rollouts", newest),
        *((f"{place}/{path}", content) for path, content in _answers(run, ids)),
    ):
        _hand_over(data, path, content)
    return len(ids)


def _answers(run: ShownRun, ids: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what the server would answer, by the path of the question."""
    yield "evals", run.evals()
    yield "timeline", run.timeline()
    for metric in run.head()["metrics"]:
        yield f"curves/{metric}", run.curves(metric)
    kept = set(ids)
    for policy, steps in run.timeline()["trainers"].items():
        for step in steps["step"]:
            content = run.step(policy, step)
            if content["batch"] is not None:
                rows = content["batch"]["rows"]
                rows["is_recorded"] = [each in kept for each in rows["rollout_id"]]
            yield f"steps/{policy}/{step}", content
    for each in ids:
        content = run.rollout(each)
        content["group"] = [row for row in content["group"] if row["id"] in kept]
        yield f"rollouts/{each}", content


def file_of(path: str) -> str:
    """Return the name of the file that answers a question; api.js makes the same one."""
    return quote(path, safe="").replace("%", "=") + ".js"


def _hand_over(data: Path, path: str, content: Any) -> None:
    text = f"astraflowAnswer({json.dumps(path)}, {json.dumps(content)});\n"
    (data / file_of(path)).write_text(text, encoding="utf-8")


def _page() -> str:
    """Return index.html with the modules in it, and a policy that lets these alone run."""
    modules = {
        f"page/{path.name}": _IMPORT.sub(r'from "page/\1"', path.read_text(encoding="utf-8"))
        for path in sorted(WEB.glob("*.js"))
        if path.name not in ("theme.js", "main.js")
    }
    urls = {
        name: "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
        for name, text in modules.items()
    }
    scripts = {
        "importmap": json.dumps({"imports": urls}),
        "module": _START,
    }
    digests = " ".join(f"'sha256-{_digest(text)}'" for text in scripts.values())
    policy = (
        f"default-src 'none'; script-src 'self' file: data: {digests}; style-src 'self' file:; "
        "img-src 'self' file:; base-uri 'none'; form-action 'none'"
    )
    page = _PRELOAD.sub("", (WEB / "index.html").read_text(encoding="utf-8"))
    tags = "\n".join(f'<script type="{kind}">{text}</script>' for kind, text in scripts.items())
    meta = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    return page.replace("<title>", meta + "<title>").replace(_MODULE, tags)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
