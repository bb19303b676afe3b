import re

from astraflow.workflows.registry import _BUILT_IN, Kind
from astraflow.workflows.rewards.code import Code
from astraflow.workflows.sandbox.protocol import SandboxLimits


def test_every_option_and_every_sandbox_is_told(page):
    text = page("sandbox.md")
    told = set(re.findall(r"`([a-z_0-9]+)`", text))
    assert set(Code.Options.model_fields) <= told
    assert set(SandboxLimits.model_fields) <= told
    assert set(_BUILT_IN[Kind.SANDBOX]) <= told
