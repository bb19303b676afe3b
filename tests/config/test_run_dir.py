"""The folder of a run."""

import stat

import pytest
from pydantic_core import to_json

from astraflow.config.run_dir import HubEndpoint, RunDir, read_json_lines
from astraflow.core.errors import AstraflowError, Reason


def test_endpoint_comes_back_and_is_for_its_owner_only(tmp_path):
    run_dir = RunDir(tmp_path / "runs" / "sort")
    endpoint = HubEndpoint(address="127.0.0.1:7", pid=3, operator_token="o", join_token="j")
    run_dir.write_endpoint(endpoint)
    assert run_dir.read_endpoint() == endpoint
    assert stat.S_IMODE(run_dir.endpoint.stat().st_mode) == 0o600


def test_a_run_without_a_hub_says_so(tmp_path):
    with pytest.raises(AstraflowError, match="has no running hub") as error:
        RunDir(tmp_path).read_endpoint()
    assert error.value.reason is Reason.NOT_READY


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    assert read_json_lines(tmp_path / "none.jsonl") == []


def test_only_a_line_feed_ends_a_line_and_a_torn_one_may_end_within_a_character(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    row = {"text": "a\u2028b\u0085c\rd"}
    path.write_bytes(to_json(row) + b"\n" + to_json({"text": "é"})[:-3])
    assert read_json_lines(path) == [row]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"delimiter|Unterminated"):
        read_json_lines(path)
