import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TITLED = re.compile(r"^```python title=\"([^\"]+)\"\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_code_on_the_front_page_is_the_code_that_the_docs_run(blocks):
    pages = ("workflows.md", "trainers.md")
    run = {title: code for page in pages for _, title, code in blocks(page) if title}
    shown = dict(_TITLED.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert shown.keys() == {"my_workflows.py", "my_trainer.py"}
    assert {title: run[title] for title in shown} == shown


def test_every_page_that_is_linked_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links {link}"
