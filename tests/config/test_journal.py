"""What a recipe may say of the hub's journal."""

import pytest
from pydantic import ValidationError

from astraflow.config.pool import JournalConfig


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://astra:hush@db/runs",
        "host=db password=hush",
        "postgresql://astra@db/runs?password=hush",
    ],
)
def test_a_password_in_a_recipe_is_refused(url):
    with pytest.raises(ValidationError, match="PGPASSWORD"):
        JournalConfig(kind="postgres", url=url)


@pytest.mark.parametrize(
    "url", ["postgresql://astra@db:5432/runs", "postgresql:///runs", "host=/tmp/x dbname=runs"]
)
def test_a_database_is_named_as_libpq_takes_it(url):
    assert JournalConfig(kind="postgres", url=url).url == url


@pytest.mark.parametrize("changes", [{"kind": "postgres"}, {"url": "host=db"}])
def test_a_url_belongs_to_its_kind(changes):
    with pytest.raises(ValidationError, match="give both or none"):
        JournalConfig(**changes)
