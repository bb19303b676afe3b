import json
import logging

import pytest
import structlog

from astraflow.core.errors import AstraflowError
from astraflow.telemetry.logging import configure_logging


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "hub.log"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_own_and_foreign_records_share_one_form(path):
    configure_logging("hub", log_file=path, json=True)

    structlog.get_logger("own").info("version live", policy_id="solver", version=3)
    logging.getLogger("foreign").warning("tokenizer %s", "slow")

    own, foreign = records(path)
    assert own.items() >= {"event": "version live", "policy_id": "solver", "version": 3}.items()
    assert own.items() >= {"level": "info", "logger": "own", "role": "hub"}.items()
    assert foreign.items() >= {"event": "tokenizer slow", "level": "warning"}.items()
    assert foreign.items() >= {"logger": "foreign", "role": "hub"}.items()
    assert own["timestamp"].endswith("Z")


def test_the_environment_chooses_the_form(path, monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_LOG_FORMAT", "json")
    configure_logging("hub", log_file=path)
    structlog.get_logger("own").info("version live")
    assert records(path)[0]["event"] == "version live"

    monkeypatch.setenv("ASTRAFLOW_LOG_FORMAT", "xml")
    with pytest.raises(AstraflowError, match="give json or text"):
        configure_logging("hub", log_file=path)


def test_a_line_for_people_has_event_and_values(path):
    configure_logging("raas-1", log_file=path)

    structlog.get_logger("own").info("version live", version=3)

    line = path.read_text()
    assert "version live" in line
    assert "version=3" in line
    assert "raas-1" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("is_json", [True, False])
def test_a_trace_shows_no_secrets_of_local_variables(path, is_json):
    configure_logging("hub", log_file=path, json=is_json)
    token = "s3cr3t" + "-value"

    try:
        int(f"x{len(token)}")
    except ValueError:
        structlog.get_logger("own").exception("failed")

    text = path.read_text()
    assert "ValueError: invalid literal" in text
    assert "s3cr3t-value" not in text


def test_lower_levels_are_left_out(path):
    configure_logging("hub", log_file=path, json=True, level="warning")

    structlog.get_logger("own").info("quiet")
    structlog.get_logger("own").warning("loud")

    assert [record["event"] for record in records(path)] == ["loud"]


def test_a_logger_made_before_follows(path):
    early = structlog.get_logger("early")
    configure_logging("hub", log_file=path, json=True)

    early.info("here")

    assert records(path)[0]["logger"] == "early"


def test_a_second_call_replaces_the_first(path, tmp_path):
    configure_logging("hub", log_file=tmp_path / "first.log", json=True)
    configure_logging("hub", log_file=path, json=True)

    structlog.get_logger("own").info("once")

    assert len(records(path)) == 1
    assert (tmp_path / "first.log").read_text() == ""


def test_without_a_file_it_goes_to_standard_error(capsys):
    configure_logging("hub", json=True)

    structlog.get_logger("own").info("here")

    streams = capsys.readouterr()
    assert json.loads(streams.err)["event"] == "here"
    assert streams.out == ""


def test_an_unknown_level_is_refused(path):
    with pytest.raises(ValueError, match="'loud' is none of debug"):
        configure_logging("hub", log_file=path, level="loud")
