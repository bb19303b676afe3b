"""A model directory is known by how it writes text."""

import json

import pytest

from astraflow.workflows.agents.template import read_identity


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    return tmp_path


def test_copies_of_a_model_are_the_same(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (copy / "config.json").write_text(json.dumps({"written_by": "another release"}))
    one, other = read_identity(folder), read_identity(copy)
    assert one.name == folder.name
    assert len(one.tokenizer_digest) == 32
    assert one.tokenizer_digest == other.tokenizer_digest
    assert one.config_digest == other.config_digest == b""


def test_another_tokenizer_is_another_model(folder):
    one = read_identity(folder)
    (folder / "tokenizer.json").write_text('{"model": 2}')
    assert read_identity(folder).tokenizer_digest != one.tokenizer_digest


def test_a_template_counts_wherever_it_stands(folder):
    assert not read_identity(folder).chat_template_digest
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    inside = read_identity(folder).chat_template_digest
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert len(inside) == 32
    assert read_identity(folder).chat_template_digest == inside


def test_a_folder_without_a_tokenizer_claims_none(tmp_path):
    assert not read_identity(tmp_path).tokenizer_digest
