"""A source of weights is looked at from outside; what is wrong with it has a name."""

import json
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson
from typer.testing import CliRunner

from astraflow.cli.main import app
from astraflow.conformance.checks import CheckList, CheckVerdict
from astraflow.conformance.weights import CHECKS, CheckedSource, check_source
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.versions import encode_version_info

TOKEN = b"secret of the run"
COMMAND = ("conformance", "weights", "--transfer-token", TOKEN.hex(), "--target")


@pytest.fixture(scope="module")
def source():
    """Serve version 0 of a small layout."""
    publisher = WeightPublisher(PolicyId("solver"), Layout.of([("w", Dtype.F32, (100,))]))
    info = publisher.publish(0, {"w": np.ones(100, np.float32).view(np.uint32)}, step=0)
    with WeightServer(publisher, lanes=()) as server:
        server.set_transfer_token(TOKEN)
        yield CheckedSource(address=server.endpoint, token=TOKEN, registered=lambda: info)


async def failed(source):
    checks = CheckList(CHECKS)
    await check_source(checks, source)
    return {check.name for check in checks.all if check.verdict is CheckVerdict.FAILED}


async def test_our_own_source_passes_every_check(source):
    assert await failed(source) == set()


async def test_a_state_of_another_digest_is_found(source):
    lie = replace(source.registered(), content_digest=bytes(16))

    assert await failed(replace(source, registered=lambda: lie)) == {"weights.state"}


async def test_a_patch_that_nobody_registered_is_found(source):
    (patch, *others) = source.registered().patches
    lie = replace(source.registered(), patches=(replace(patch, root_digest=bytes(32)), *others))

    assert await failed(replace(source, registered=lambda: lie)) == {
        "weights.plan",
        "weights.state",
    }


async def test_a_layout_that_is_not_the_registered_one_is_found(source):
    lie = replace(source.registered(), layout_digest=bytes(32))

    assert "weights.layout" in await failed(replace(source, registered=lambda: lie))


async def test_a_source_that_is_not_there_fails_every_check_by_name(source):
    found = await failed(replace(source, address="127.0.0.1:1"))

    assert found == {check.name for check in CHECKS}


@pytest.mark.parametrize(("digest", "code"), [(None, 0), (bytes(16), 1)])
def test_the_command_says_what_it_found(source, tmp_path, digest, code):
    info = (
        source.registered()
        if digest is None
        else replace(source.registered(), content_digest=digest)
    )
    version = tmp_path / "version.json"
    version.write_text(MessageToJson(encode_version_info(info)))
    said = CliRunner().invoke(
        app,
        [*COMMAND, source.address, "--version-info", str(version), "--json"],
    )

    assert said.exit_code == code, said.output
    found = json.loads(said.stdout)
    assert found["passed"] is (code == 0)
    assert len(found["checks"]) == len(CHECKS)


def test_a_version_that_cannot_be_read_is_refused_with_what_to_give(tmp_path):
    path = tmp_path / "version.json"
    path.write_text("{")
    said = CliRunner().invoke(
        app,
        [*COMMAND, "127.0.0.1:1", "--version-info", str(path)],
    )

    assert "PublishVersionRequest" in str(said.exception)
