"""docs/reference is what the protos say, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def test_the_reference_is_what_the_protos_say():
    script = ROOT / "scripts" / "make_api_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False)
    assert done.returncode == 0, "docs/reference is stale: run scripts/make_api_docs.py"


def test_every_link_leads_to_a_heading():
    held = {f"{page.name}{anchor}" for page in PAGES for anchor in ("", *anchors(page))}
    wanted = {target for page in PAGES for target in targets(page)}
    assert wanted - held == set()


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [f"#{heading.lower().replace('.', '')}" for heading in headings]


def targets(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("../"):
            yield page.name + target if target.startswith("#") else target
