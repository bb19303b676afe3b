"""Builds the site of the documentation into build/docs: `build_docs.py [--stage-only]`.

Pages keep their places, so that links between them are those of the repository. Links to files
that are no pages become plain text. Notebooks become pages with what their cells printed.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "docs"
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_STARTS: Final = re.compile(r"(- |\d+\. |\|)")
_GLOBS: Final = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "docs/**/*.png"),
    *("docs/tutorials/*.ipynb", "recipes/**/README.md", "recipes/**/*.png"),
)


def sources() -> set[str]:
    """Return the files of the site, as paths in the repository."""
    return {str(path.relative_to(ROOT)) for glob in _GLOBS for path in ROOT.glob(glob)}


def navigation(entries: Sequence[Any], known: set[str]) -> list[Any]:
    """Return the navigation with its globs filled in, and without what is empty then.

    A page has one place: a glob takes those that no entry and no glob before it has.

    Raises:
        FileNotFoundError: A page that is named is not there.
    """
    taken = set(_named(entries))
    if missing := sorted(taken - known):
        raise FileNotFoundError(f"docs/mkdocs.yml names {', '.join(missing)}, which is not there")

    def fill(parts: Sequence[Any]) -> Iterator[Any]:
        for part in parts:
            if isinstance(part, dict):
                [(title, below)] = cast("dict[str, Any]", part).items()
                filled = _page(below) if isinstance(below, str) else list(fill(below))
                yield from [{title: filled}] if filled else []
            elif "*" in part:
                found = sorted(_matches(part, known) - taken)
                taken.update(found)
                yield from map(_page, found)
            else:
                yield _page(part)

    return list(fill(entries))


def _named(entries: Sequence[Any]) -> Iterator[str]:
    """Yield the pages that are named, without those of globs."""
    for each in entries:
        if isinstance(each, dict):
            [below] = cast("dict[str, Any]", each).values()
            yield from [below] if isinstance(below, str) else _named(below)
        elif "*" not in each:
            yield each


def _matches(glob: str, known: set[str]) -> set[str]:
    return {name for name in known if Path(name).match(glob)}


def _page(source: str) -> str:
    return source.replace(".ipynb", ".md")


def page_text(source: str, known: set[str]) -> str:
    """Return a page as the builder reads it."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".ipynb"):
        text = notebook_text(json.loads(text))
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_spaced(_relinked(part, Path(source), known)) for part in parts[::2]]
    return "".join(parts)


def _relinked(text: str, source: Path, known: set[str]) -> str:
    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if ":" in path or not path:
            return match[0]
        place = str((ROOT / source.parent / path).resolve().relative_to(ROOT))
        for name in (place, f"{place}/README.md"):
            if name in known:
                target = _page(path if name == place else f"{path.rstrip('/')}/README.md")
                return f"{mark}[{words}]({target}{'#' + anchor if anchor else ''})"
        if not (ROOT / place).exists():
            raise FileNotFoundError(f"{source} links {target}, which is not there")
        return words

    return _LINK.sub(link, text)


def _spaced(text: str) -> str:
    """Put an empty line before lists and tables that follow a paragraph at once."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        begins = _STARTS.match(line) and before and not before.startswith((" ", *"-|0123456789"))
        lines += ["", line] if begins else [line]
    return "\n".join(lines)


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook, and what they printed."""
    blocks: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        language = "bash" if source.startswith("!") else "python"
        blocks.append(f"```{language}\n{source}\n```")
        said = "".join("".join(output.get("text", ())) for output in cell["outputs"]).strip("\n")
        if said:
            blocks.append(f"```text\n{said}\n```")
    return "\n\n".join(blocks) + "\n"


def stage() -> Path:
    """Copy the pages and return the builder's configuration."""
    known = sources()
    shutil.rmtree(BUILD, ignore_errors=True)
    for name in known:
        target = BUILD / "pages" / _page(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            shutil.copyfile(ROOT / name, target)
        else:
            target.write_text(page_text(name, known), encoding="utf-8")
    settings = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = navigation(settings["nav"], known)
    config = BUILD / "mkdocs.yml"
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return config


def main() -> int:
    """Build the site; a warning is an error."""
    config = stage()
    if "--stage-only" in sys.argv:
        return 0
    builder = Path(sys.executable).with_name("zensical")
    return subprocess.run([builder, "build", "--strict", "-f", config], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
