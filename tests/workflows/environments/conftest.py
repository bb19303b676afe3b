from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _worlds_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
