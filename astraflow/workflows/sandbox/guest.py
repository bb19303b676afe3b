"""The inside of a sandbox: runs what it is asked to within limits, and tells what became of it.

A script of its own, of the standard library alone: `python -I -S -X utf8 guest.py PACKAGES...`. It
reads requests on its standard input and answers on its standard output. It imports few modules and
none that is slow: the time it takes to start is the time it takes to have a fresh sandbox.

Programs have the same user. What keeps them from the guest: it is not dumpable, so that neither
its memory nor its descriptors can be had (PR_SET_DUMPABLE); as the first process of a PID namespace
it cannot be killed or stopped from inside; and it answers plain data, which its owner reads with
suspicion.

A program that is judged never has the right answers in its memory: its owner compares outputs.
Tests that are code are read and run by a process of their own (`_check`), to which the program's
process returns plain data.
"""

from __future__ import annotations

import _ctypes  # pyright: ignore[reportMissingModuleSource]
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType
    from typing import Any, NoReturn

    Request = dict[str, Any]
else:
    # `signal` makes enumerations of it, which is slow.
    import _signal

_IS_LINUX = sys.platform == "linux"
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_SIGINT, _SIGKILL, _SIGPIPE, _SIGSTOP, _SIGXFSZ = 2, 9, 13, 19, 25
_NOT_STARTED = 127
# What a program's tracebacks call it.
_FILE = "program.py"
_PIECE = 2**16
# Descriptors of a child beside the standard ones: what a call returned or a test found goes to the
# first; of tests and the program that they call, the others.
_RESULT, _TO, _FROM, _TESTS = 3, 4, 5, 6
# Far above all that are open.
_ASIDE, _MOST_DESCRIPTORS = 64, 4096
_MOST_DEPTH = 100
# Between two looks at a child without a pidfd.
_LOOK_S = 0.005
# OpenBLAS and its like take some 40 MiB of private memory per thread as soon as they are loaded,
# and a thread for every processor of the machine. A command may be given another number.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Serve requests until the owner hangs up."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # As the first process of a namespace it gets no signal from inside that it has no handler for.
    _signal.signal(_SIGINT, _signal.SIG_DFL)
    asks, answers = os.dup(0), os.dup(1)
    sys.path += sys.argv[1:]
    os.environ.update(_ONE_THREAD)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    serve: dict[str, Callable[[Request, int], list[bytes]]] = {
        "exec": _exec,
        "read": _read,
        "write": _write,
        "program": _program,
        "call": _call,
        "check": _check,
    }
    _say(answers, [b"ready"])
    while (asked := receive(asks)) is not None:
        _say(answers, serve[asked["do"]](asked, asks))
    _kill_all()


def _exec(asked: Request, asks: int) -> list[bytes]:
    """Run a command. Return as `_run`; what it leaves running goes on."""
    command = asked["command"]

    def start() -> NoReturn:
        for number in (_SIGPIPE, _SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        try:
            os.chdir(asked["cwd"])
            os.execvpe(command[0], command, _ONE_THREAD | asked["env"])  # noqa: S606 - as asked for
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_STARTED)

    return _run([(start, ())], asked, asks)


def _program(asked: Request, asks: int) -> list[bytes]:
    """Run a Python program as `python program.py` does, in an interpreter that is warm."""

    def start() -> None:
        _play(asked["source"], "__main__")

    return _run([(start, ())], asked, asks)


def _call(asked: Request, asks: int) -> list[bytes]:
    """Call a function of a Python program; what it returns is the result."""

    def start() -> None:
        function = _function(_play(asked["source"], "solution"), asked["name"])
        _write_all(_RESULT, encoded(function(*asked["arguments"])).encode())

    return _run([(start, ())], asked, asks)


def _check(asked: Request, asks: int) -> list[bytes]:
    """Run tests that are code; the result is `passed`, or why not.

    The tests are what the owner sends after the request: only their own process reads that, and
    the program's process, which starts when they were read, only sees the arguments of calls.
    """
    calls, results = os.pipe(), os.pipe()
    starts: list[tuple[Callable[[], object], Sequence[int]]] = [
        (lambda: _test(asked), (calls[1], results[0], asks)),
        (lambda: _answer_calls(asked["source"]), (calls[0], results[1])),
    ]
    return _run(starts, asked, asks)


def _read(asked: Request, _: int) -> list[bytes]:
    """Return whether a file was read, and it or why not."""
    try:
        # A FIFO does not hang the guest.
        number = os.open(asked["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(number).st_mode & 0o170000 != 0o100000:
                return [b"error", b"it is no file"]
            data = bytearray()
            while piece := os.read(number, 2**20):
                data += piece
                if len(data) > asked["file_nbytes"]:
                    return [b"error", b"it is larger than file_mb"]
        finally:
            os.close(number)
    except (OSError, ValueError) as error:
        return [b"error", str(error).encode()]
    return [b"ok", bytes(data)]


def _write(asked: Request, _: int) -> list[bytes]:
    """Write a file with its folders; return whether, or why not."""
    path = asked["path"]
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib is slow
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(path, flags, 0o700)
        try:
            _write_all(number, asked["data"])
        finally:
            os.close(number)
    except (OSError, ValueError) as error:
        return [b"error", str(error).encode()]
    return [b"ok"]


def _run(
    starts: Sequence[tuple[Callable[[], object], Sequence[int]]], asked: Request, asks: int
) -> list[bytes]:
    """Run child processes until the first has ended, or at a limit.

    Args:
        starts: What each child does, and the descriptors that it has from the fourth on, which
            are closed here; the first has one for its result before them.
        asked: The request, with its limits.
        asks: The owner's descriptor; when it is closed, all is killed.

    Returns:
        Why it ended (`exited`, `time`, `output`), the exit code or -signal, the two outputs, the
        result, and `1` when output was dropped.
    """
    pipes = [os.pipe() for _ in range(4)]
    (into, feed), *readers = pipes
    standard = (into, readers[0][1], readers[1][1])
    first = _child(starts[0][0], (*standard, readers[2][1], *starts[0][1]), asked)
    for start, more in starts[1:]:
        _child(start, (*standard, *more), asked)
    theirs = {number for _, more in starts for number in more} - {asks}
    for number in (into, *(pipe[1] for pipe in readers), *theirs):
        os.close(number)
    kept = {pipe[0]: bytearray() for pipe in readers}
    try:
        why, status = _watch(first, feed, kept, asked, asks)
    finally:
        for number in kept:
            os.close(number)
    if status is None:
        if why != "exited":
            os.kill(first, _SIGKILL)
        status = os.waitpid(first, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if not _IS_LINUX and (why != "exited" or asked["do"] != "exec"):
        try:  # noqa: SIM105 - contextlib is slow to import
            os.killpg(first, _SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    if why != "exited" or asked["do"] != "exec":
        _kill_all()
    _bury()
    most = asked["output_nbytes"]
    truncated = any(len(said) > most for said in kept.values())
    said = [bytes(each[:most]) for each in kept.values()]
    return [why.encode(), b"%d" % code, *said, b"%d" % truncated]


def _watch(  # noqa: PLR0912 - one loop over all that may happen to a child
    first: int, feed: int, kept: dict[int, bytearray], asked: Request, asks: int
) -> tuple[str, int | None]:
    """Feed a child and keep what it says until it ends; return why it did.

    Also with what status, if it was waited for.
    """
    status: int | None = None
    try:
        ended = os.pidfd_open(first)
    except (OSError, AttributeError):
        # gVisor has none, and what is not Linux: the child is looked at every few milliseconds.
        ended = None
    deadline = time.monotonic() + asked["time_s"]
    left = memoryview(asked.get("stdin", b""))
    most = asked["output_nbytes"]
    watched = select.poll()
    if not asked.get("is_only"):
        watched.register(asks, 0)
    for number in kept if ended is None else (ended, *kept):
        watched.register(number, select.POLLIN)
    for number in (feed, *kept):
        os.set_blocking(number, False)
    watched.register(feed, select.POLLOUT)
    why = ""
    while not why:
        left_s = deadline - time.monotonic()
        pause_s = left_s if ended is not None else min(left_s, _LOOK_S)
        ready = {number for number, _ in watched.poll(pause_s * 1000)} if left_s > 0 else set[int]()
        if asks in ready:
            _kill_all()
            os._exit(0)
        if feed in ready:
            left = _fed(feed, left)
            if not left:
                watched.unregister(feed)
                os.close(feed)
        for number in ready & kept.keys():
            if not _kept_more(number, kept[number], most):
                watched.unregister(number)
        if left_s <= 0:
            why = "time"
        elif asked["do"] != "exec" and any(len(said) > most for said in kept.values()):
            why = "output"
        elif ended is None:
            status = _ended_status(first)
            why = "" if status is None else "exited"
        elif ended in ready:
            why = "exited"
    if left:
        os.close(feed)
    if ended is not None:
        os.close(ended)
    if why == "exited":
        for number, said in kept.items():
            # Who was left running may hold the other end, and go on.
            while len(said) <= most and _kept_more(number, said, most):
                pass
    return why, status


def _ended_status(pid: int) -> int | None:
    """Return the status of a child that has ended; None: it has not."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return status if ended else None


def _fed(feed: int, left: memoryview) -> memoryview:
    """Return what is left of the standard input; nothing when nobody reads it any more."""
    try:
        return left[os.write(feed, left[:_PIECE]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]


def _kept_more(number: int, said: bytearray, most: int) -> bool:
    """Read one piece, which is dropped when there was too much before; False: there is none."""
    try:
        piece = os.read(number, _PIECE)
    except BlockingIOError:
        return False
    if len(said) <= most:
        said += piece
    return bool(piece)


def _child(start: Callable[[], object], descriptors: Sequence[int], asked: Request) -> int:
    """Fork a process that has these descriptors, from 0 on, and no others."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for place, number in enumerate(descriptors):
            os.dup2(number, _ASIDE + place)
        for place in range(len(descriptors)):
            os.dup2(_ASIDE + place, place)
        os.closerange(len(descriptors), _MOST_DESCRIPTORS)
        os.setsid()
        _limit(asked)
        start()
        _leave(0)
    except SystemExit as leave:
        _leave(leave.code)
    except BaseException:  # noqa: BLE001 - a program raises anything
        _print_traceback(*sys.exc_info())
        _leave(1)
    finally:
        os._exit(1)


def _print_traceback(kind: Any, error: Any, place: Any) -> None:
    """Print a traceback, from the first line of the program's own on."""
    whole = place
    while place is not None and place.tb_frame.f_code.co_filename != _FILE:
        place = place.tb_next
    sys.excepthook(kind, error, place or whole)


def _limit(asked: Request) -> None:
    """Put this process under the limits of a request."""
    seconds = int(asked["time_s"]) + 2
    # A runtime that reserves more address space than it uses, such as node, is none of ours.
    memory = resource.RLIMIT_DATA if asked["do"] == "exec" else resource.RLIMIT_AS
    limits = [
        (memory, asked["memory_nbytes"]),
        (resource.RLIMIT_FSIZE, asked["file_nbytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ]
    task_count = _most_tasks(asked)
    if task_count is not None:
        limits.append((resource.RLIMIT_NPROC, task_count))
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def _most_tasks(asked: Request) -> int | None:
    """Return how many threads the user may have anywhere, for that is bounded; None: any number."""
    if asked["beside"] == "all":
        return asked["task_count"] + _tasks_of_user() if _IS_LINUX else None
    return None if asked["beside"] == "containers" and _is_bounded() else asked["task_count"]


def _tasks_of_user() -> int:
    """Return how many threads this user has; nothing bounds root."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc") if user else ():  # noqa: PTH208 - pathlib is slow
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:  # noqa: PTH123 - the same
                told = dict(line.split(b":", 1) for line in file.read().splitlines())
        except OSError:
            continue
        if int(told.get(b"Uid", b"-1").split()[0]) == user:
            count += int(told.get(b"Threads", b"1"))
    return count


def _is_bounded() -> bool:
    """Whether the control group here bounds its processes and threads."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow
                return file.read() != b"max\n"
        except OSError:
            continue
    return False


def _leave(code: Any) -> NoReturn:
    """End as the interpreter does: threads, what was registered, what was not written yet."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # noqa: SLF001 - as the interpreter does
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()  # noqa: SLF001 - as the interpreter does
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - of a program, or nobody reads
        code = code or 120
    os._exit((code or 0) & 255)


def _play(source: str, name: str) -> dict[str, Any]:
    """Run a program as the module `name`, and return its names."""
    import builtins  # noqa: PLC0415 - in a program's own process alone

    for leave in ("exit", "quit"):
        setattr(builtins, leave, sys.exit)
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = [_FILE]
    exec(compile(source, _FILE, "exec"), module.__dict__)  # noqa: S102 - what this is for
    return module.__dict__


def _function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return a function of a program, or a method of its class `Solution`."""
    if name not in names and hasattr(names.get("Solution"), name):
        return getattr(names["Solution"](), name)
    if name not in names:
        message = f"name '{name}' is not defined"
        raise NameError(message)
    return names[name]


def _answer_calls(source: str) -> None:
    """Run a program, then call its functions as the process with the tests asks for."""
    calls, results = 3, 4
    if os.read(calls, 1) != b"!":
        return
    names = _play(source, "solution")
    while (call := receive(calls)) is not None:
        name, arguments, keywords = call
        try:
            answer = f'["ok",{encoded(_function(names, name)(*arguments, **keywords))}]'
        except Exception as error:  # noqa: BLE001 - a program raises anything
            answer = encoded(["error", type(error).__name__, str(error)])
        data = answer.encode()
        _write_all(results, len(data).to_bytes(4, "little") + data)


class _Broken(BaseException):
    """The tests themselves cannot run, or the program is gone; no test can catch it."""


def _test(asked: Request) -> None:
    """Run tests whose calls go to the program's process; say `passed`, or why not."""
    tests = receive(_TESTS)
    os.close(_TESTS)
    builtin_names = set(dir(sys.modules["builtins"])) | {"__name__"}
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        try:
            exec(compile(tests["setup"], "setup.py", "exec"), names)  # noqa: S102 - of the data set
            code = compile(tests["code"], "tests.py", "exec")
        except Exception as error:
            message = f"broken: {type(error).__name__}: {error}"
            raise _Broken(message) from error
        _write_all(_TO, b"!")
        entry = tests["entry_point"]
        unknown = {entry} if entry else set(_names(code)) - builtin_names - names.keys()
        for name in unknown:
            names[name] = _remote(name, asked["output_nbytes"])
        exec(code, names)  # noqa: S102 - of the data set
        if entry and "check" in names:
            names["check"](names[entry])
        said = "passed"
    except BaseException as error:  # noqa: BLE001 - tests raise anything
        said = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
    _write_all(_RESULT, said.encode("utf-8", "replace"))
    os._exit(0)


def _names(code: CodeType) -> Iterator[str]:
    """Yield all names that code refers to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _names(constant)


def _remote(name: str, most: int) -> Callable[..., Any]:
    """Return a function that calls one of the program."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        data = marshal.dumps((name, arguments, keywords), 2)
        try:
            _write_all(_TO, len(data).to_bytes(4, "little") + data)
        except BrokenPipeError:
            raise _Broken("the program ended") from None
        size = _exactly(_FROM, 4)
        if size is None or int.from_bytes(size, "little") > most:
            raise _Broken("the program ended" if size is None else "the program returned too much")
        answer = decoded(_exactly(_FROM, int.from_bytes(size, "little")) or b"")
        match answer:
            case ["ok", value]:
                return value
            case ["error", str(kind), str(message)]:
                raised = getattr(sys.modules["builtins"], kind, None)
                if isinstance(raised, type) and issubclass(raised, Exception):
                    raise raised(message)
                raise RuntimeError(f"{kind}: {message}")
            case _:
                raise _Broken("the program answered nonsense")

    return call


def encoded(value: Any, depth: int = 0) -> str:  # noqa: PLR0911, PLR0912 - a case a type
    """Return plain data as JSON; what JSON has no word for is an object with one key.

    Tuples are {"t": [...]}, sets {"s": [...]}, dicts {"d": [[key, value], ...]}, bytes
    {"b": latin-1}, complex numbers {"c": [real, imaginary]}, floats without digits {"f": "nan"}.

    Raises:
        TypeError: It is no plain data.
    """
    from _json import encode_basestring_ascii  # noqa: PLC0415 - json itself is slow to import

    def several(values: Any) -> str:
        return ",".join([encoded(each, depth + 1) for each in values])

    if depth > _MOST_DEPTH:
        raise TypeError("what was returned is nested too deeply")
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():
            said = float.__repr__(value)
            return said if value - value == 0 else f'{{"f":"{said}"}}'
        case str():
            return encode_basestring_ascii(value)
        case list():
            return f"[{several(value)}]"
        case tuple():
            return f'{{"t":[{several(value)}]}}'
        case set() | frozenset():
            return f'{{"s":[{several(value)}]}}'
        case dict():
            pairs = map(list, value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            return f'{{"d":[{several(pairs)}]}}'
        case bytes() | bytearray():
            return f'{{"b":{encode_basestring_ascii(value.decode("latin-1"))}}}'
        case complex():
            return f'{{"c":[{several((value.real, value.imag))}]}}'
        case _:
            raise TypeError(f"a {type(value).__name__} was returned, which is no plain data")


def decoded(text: bytes) -> Any:
    """Return what `encoded` was given.

    Raises:
        ValueError: It is nothing of the kind.
    """
    import json  # noqa: PLC0415 - slow to import, and seldom needed inside

    made: dict[str, Callable[[Any], Any]] = {
        "t": tuple,
        "s": set,
        "d": dict,
        "b": lambda said: said.encode("latin-1"),
        "c": lambda said: complex(*said),
        "f": float,
    }

    def untagged(tagged: dict[str, Any]) -> Any:
        ((tag, said),) = tagged.items()
        return made[tag](said)

    try:
        return json.loads(text, object_hook=untagged)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError("not of the form that a guest writes") from error


def receive(number: int) -> Any:
    """Read one request; None at the end."""
    size = _exactly(number, 4)
    data = None if size is None else _exactly(number, int.from_bytes(size, "little"))
    return None if data is None else marshal.loads(data)  # noqa: S302 - of the owner


def _exactly(number: int, nbytes: int) -> bytes | None:
    """Read so many bytes and not one more; None when there are fewer."""
    data = bytearray()
    while len(data) < nbytes:
        piece = os.read(number, min(nbytes - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _say(number: int, parts: Sequence[bytes]) -> None:
    """Answer with several parts."""
    sizes = (len(parts), *map(len, parts))
    _write_all(number, b"".join([size.to_bytes(4, "little") for size in sizes]) + b"".join(parts))


def _write_all(number: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]


def _kill_all() -> None:
    """Kill all that came of this process until nobody is left."""
    if os.getpid() == 1:
        # All of its namespace, in one instant.
        try:
            os.kill(-1, _SIGKILL)
        except ProcessLookupError:
            return
    while pids := _below(os.getpid()):
        for number in (_SIGSTOP, _SIGKILL):
            for pid in pids:
                try:  # noqa: SIM105 - contextlib is slow to import
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        if not _bury():
            time.sleep(0.001)


def _bury() -> int:
    """Reap all that have ended; return how many."""
    count = 0
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            count += 1
    except ChildProcessError:
        pass
    return count


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    if not _IS_LINUX:
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # noqa: PTH110 - pathlib is slow
        return _below_by_parents(pid)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        tasks = f"/proc/{waiting.pop()}/task"
        try:
            for task in os.listdir(tasks):  # noqa: PTH208 - pathlib is slow
                with open(f"{tasks}/{task}/children", "rb") as file:  # noqa: PTH123 - the same
                    children = [int(child) for child in file.read().split()]
                waiting += children
                found += children
        except OSError:
            # It ended while it was looked at.
            continue
    return found


def _below_by_parents(pid: int) -> list[int]:
    """Return as `_below`, where the kernel lists no children (gVisor)."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - the same
                # The name, which may hold anything, is in brackets.
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            # It is none, or ended while it was looked at.
            continue
    found = [pid]
    for parent in found:
        found += [each for each, its in parents.items() if its == parent]
    return found[1:]


def _prctl(option: int, value: int) -> None:
    if not _IS_LINUX:
        return
    # Without ctypes, which takes longer than the rest of this start.
    library = _ctypes.dlopen(None, 0)  # pyright: ignore[reportArgumentType] - this program
    address = _ctypes.dlsym(library, "prctl")
    _ctypes.call_function(address, (option, value, 0, 0, 0))


if __name__ == "__main__":
    main()
