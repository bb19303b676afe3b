"""Sandboxes of every kind that this machine can run."""

import os
import shutil

import pytest

from astraflow.core.errors import AstraflowError
from astraflow.workflows.building import build_sandboxes

CONTAINERS = {
    name: {
        "arguments": os.environ.get("ASTRAFLOW_SANDBOX_ARGUMENTS", "").split(),
        "client_arguments": os.environ.get("ASTRAFLOW_SANDBOX_CLIENT_ARGUMENTS", "").split(),
    }
    for name in ("podman", "docker")
}


async def started(name, **options):
    """Return a provider and a sandbox of it; the test is skipped where none can be."""
    if name in CONTAINERS:
        image = os.environ.get("ASTRAFLOW_SANDBOX_IMAGE")
        if image is None or shutil.which(name) is None:
            pytest.skip(f"needs {name}, and ASTRAFLOW_SANDBOX_IMAGE with python3")
        options |= {"image": image} | CONTAINERS[name]
    provider = build_sandboxes(name, options, where="sandbox_options")
    try:
        return provider, await provider.start()
    except AstraflowError as error:
        await provider.close()
        if "does not let users make namespaces" in error.message:
            pytest.skip(error.message)
        raise


@pytest.fixture
async def start():
    """Start sandboxes that end with the test."""
    made = []

    async def make(name="bubblewrap", **options):
        provider, sandbox = await started(name, **options)
        made.extend((sandbox, provider))
        return sandbox

    yield make
    for each in made:
        await each.close()
