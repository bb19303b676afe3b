"""Code of users under guard: no processes, limited time, and the lines that raised."""

import asyncio
import importlib
import io
import subprocess
import sys
import threading

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.check.guard import (
    OvertimeError,
    ProcessRefusedError,
    UserLoop,
    is_process_refused,
    message_of,
    no_processes,
    reporting_delays,
    user_lines,
)


@pytest.fixture
def loop():
    made = UserLoop(60.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: __import__("os").system("true"),
        lambda: __import__("os").fork(),
        lambda: __import__("os").posix_spawn("/bin/true", ["true"], {}),
    ],
)
def test_no_process_is_started_while_it_is_guarded(start):
    with no_processes(), pytest.raises(ProcessRefusedError) as refused:
        start()
    assert is_process_refused(refused.value)
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0


def test_a_loop_is_guarded_by_who_runs_on_it_and_others_are_not(loop):
    async def start():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        return await process.wait()

    started = []
    with no_processes():
        with pytest.raises(ProcessRefusedError):
            loop.run(start)
        other = threading.Thread(
            target=lambda: started.append(subprocess.run([sys.executable, "-c", ""], check=True))
        )
        other.start()
        other.join()
    assert len(started) == 1


def test_what_is_printed_meanwhile_is_not_the_commands(capsys):
    with no_processes():
        print("hello")  # noqa: T201
    assert capsys.readouterr() == ("", "hello\n")


def test_code_that_takes_long_is_told_with_its_line(tmp_path, monkeypatch):
    told = threading.Event()

    class Console(io.StringIO):
        def write(self, text):
            written = super().write(text)
            told.set()
            return written

    module = tmp_path / "imported_for_long.py"
    module.write_text("from builtins import told_for_a_test\ntold_for_a_test.wait(60)\n")
    monkeypatch.setattr("builtins.told_for_a_test", told, raising=False)
    monkeypatch.setattr(sys, "stderr", Console())
    monkeypatch.syspath_prepend(tmp_path)
    with reporting_delays(after_s=0.01):
        importlib.import_module("imported_for_long")
    assert "imported_for_long.py, line 2" in sys.stderr.getvalue()


def test_one_loop_serves_all_calls(loop):
    async def mine():
        return asyncio.get_running_loop()

    assert loop.run(mine) is loop.run(mine)


def test_what_raises_is_raised_here(loop):
    async def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(fail)


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_never_ends_is_left_and_the_next_call_has_a_loop(is_busy):
    loop = UserLoop(0.3)

    async def hang():
        while is_busy:
            pass
        await asyncio.Event().wait()

    async def fine():
        return 1

    with pytest.raises(OvertimeError) as late:
        loop.run(hang)
    assert "in hang" in late.value.lines
    assert late.value.limit_s == 0.3
    with pytest.raises(OvertimeError) as late:
        loop.run(hang)
    assert late.value.limit_s < 0.3
    with pytest.raises(OvertimeError) as late:
        loop.run(fine)
    assert late.value.limit_s == 0
    loop.close()


def test_lines_are_those_of_the_first_cause():
    def inner():
        raise KeyError("weight")

    def outer():
        try:
            inner()
        except KeyError as error:
            raise AstraflowError(Reason.SCORER_FAILED, "the scorer failed") from error

    with pytest.raises(AstraflowError) as caught:
        outer()
    assert message_of(caught.value) == "KeyError: 'weight'"
    lines = user_lines(caught.value).splitlines()
    assert lines[-1].endswith('in inner: raise KeyError("weight")')


def test_an_error_that_is_its_own_cause_is_told():
    error = ValueError("again")
    error.__cause__ = error
    assert message_of(error) == "ValueError: again"


def test_the_first_of_a_group_is_told():
    group = ExceptionGroup("several", [ValueError("one"), ValueError("two")])
    assert message_of(group) == "ValueError: one"
