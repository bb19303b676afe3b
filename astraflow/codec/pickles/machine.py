"""The machine that reads a pickle: a stack, marks, a memo, and a table of what names stand for.

`pickletools` knows the instructions of protocols 0 to 5, and reads what follows them. The table
below has those that plain data is made of; the others, which make objects of classes, are refused,
as is any name that whoever runs the machine does not know.
"""

import codecs
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final, TypeAlias, cast

from astraflow.core.errors import AstraflowError, Reason

# Bytes that may be copied out of a body, and values in the result, counted once for every place
# where they stand: as multiples of the body's size. A body of a few bytes may still say something.
_COPY_SHARE: Final = 4
_VISIT_SHARE: Final = 8
_LEAST_NBYTES: Final = 1 << 12

_LINE_NBYTES: Final = 1 << 20
_MAX_LONG_BITS: Final = 128
_MAX_MEMO: Final = 1 << 32
_MAX_PROTOCOL: Final = 5
_MAX_ARGUMENTS: Final = 16
_KEYS: Final = (str, bytes, bool, type(None))

Call: TypeAlias = Callable[..., Any]
"""What stands for a name: takes the budget and the arguments of a REDUCE, and checks them."""

# The first text of protocol 0 would import it.
codecs.lookup("raw-unicode-escape")


def refused(why: str) -> AstraflowError:
    """Return the error of every body that is not read."""
    return AstraflowError(Reason.INVALID_FIELD, f"the pickled body is refused: {why}")


class Budget:
    """What is left of what one body may cost, the torch files in it included.

    Attributes:
        steps: One for every instruction. One makes at most one small object, so that memory is
            bounded by some 100 bytes a step beside what is copied.
    """

    def __init__(self, step_count: int, body_nbytes: int) -> None:
        self.steps = iter(range(step_count))
        self._visits = _VISIT_SHARE * body_nbytes + _LEAST_NBYTES
        self._nbytes = _COPY_SHARE * body_nbytes + _LEAST_NBYTES

    def visit(self) -> None:
        self._visits -= 1
        if self._visits < 0:
            raise refused("it has too many values within values")

    def spend(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise refused(f"it would take more than {_COPY_SHARE} times its size")


class PickleFile(BytesIO):
    """The bytes of a pickle. A line has a bound, and is paid for however often it is read."""

    def __init__(self, raw: bytes | bytearray | memoryview, budget: Budget) -> None:
        super().__init__(raw)
        self.budget = budget

    def readline(self, _: int | None = -1, /) -> bytes:
        """Return the next line, or the beginning of one that is too long."""
        line = super().readline(_LINE_NBYTES)
        self.budget.spend(len(line))
        return line


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name on the stack: no value of a result."""

    name: str
    call: Call


def run(file: PickleFile, names: Mapping[str, Call], persistent: Call | None = None) -> Any:
    """Return the value of a pickle, at whose end the file stands afterwards.

    Args:
        file: At the first instruction.
        names: What stands for "module name"; any other name is refused.
        persistent: Returns what a persistent id stands for; None: there are none.

    Raises:
        AstraflowError: INVALID_FIELD.
        ValueError, TypeError, OverflowError, LookupError: It is not well formed.
    """
    machine, read = _Machine(file.budget, names, persistent), file.read
    for _ in file.budget.steps:
        code = read(1)
        if code == b".":
            return machine.stack.pop()
        if code not in _BY_CODE:
            why = f"instruction {code!r} makes what is no plain data" if code else "it has no end"
            raise refused(why)
        argument, instruction = _BY_CODE[code]
        instruction(machine, argument and argument(file))
    raise refused("it has too many instructions")


@dataclass(slots=True)
class _Machine:
    """What instructions work on: values above the last mark, those below it, a memo."""

    budget: Budget
    names: Mapping[str, Call]
    persistent: Call | None
    stack: list[Any] = field(default_factory=list[Any])
    below: list[list[Any]] = field(default_factory=list[list[Any]])
    memo: dict[int, Any] = field(default_factory=dict[int, Any])

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_copied(self, value: Any) -> None:
        self.budget.spend(len(value))
        self.stack.append(bytes(value) if type(value) is bytearray else value)

    def push_long(self, value: int) -> None:
        if value.bit_length() > _MAX_LONG_BITS:
            raise refused(f"it has a number of more than {_MAX_LONG_BITS // 8} bytes")
        self.stack.append(value)

    def take(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        if len(values) < count:
            raise refused("it takes a value where there is none")
        del self.stack[-count:]
        return values

    def mark(self, _: None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def remember(self, number: int) -> None:
        if not 0 <= number < _MAX_MEMO:
            raise refused("it remembers a value under a number that can be made to collide")
        self.memo[number] = self.stack[-1]

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise refused(f"it adds to what is no {kind.__name__}")
        return self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def update(self, values: list[Any]) -> None:
        self.top(dict).update(_dict(values))

    def push_symbol(self, name: str) -> None:
        if name not in self.names:
            told = name[:512].replace(" ", ".")
            raise refused(f"it names {told}, which is not on the list of what is read")
        self.stack.append(Symbol(name, self.names[name]))

    def reduce(self, target: Any, arguments: Any) -> None:
        if type(target) is not Symbol:
            raise refused("it calls what is no name")
        self.stack.append(target.call(self.budget, *_few(arguments)))

    def build(self, target: Any, state: Any) -> None:
        if not hasattr(target, "build"):
            raise refused("it gives a state to what takes none")
        target.build(*_few(state))
        self.stack.append(target)

    def persist(self, name: Any) -> None:
        if self.persistent is None:
            raise refused("it has persistent ids")
        self.stack.append(self.persistent(name))


def _few(arguments: Any) -> tuple[Any, ...]:
    if type(arguments) is not tuple or len(cast("tuple[Any, ...]", arguments)) > _MAX_ARGUMENTS:
        raise refused("what follows a name are no arguments")
    return cast("tuple[Any, ...]", arguments)


def _dict(values: list[Any]) -> dict[Any, Any]:
    """Return a dict of keys and values in turn."""
    keys = values[::2]
    if not all(type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 31) for key in keys):
        # Tuples within tuples take for ever to hash, and others can be made to collide.
        raise refused("a key of a dict is no text or number")
    return dict(zip(keys, values[1::2], strict=True))


def _require_protocol(_: _Machine, number: int) -> None:
    if number > _MAX_PROTOCOL:
        raise refused(f"it is of a protocol after {_MAX_PROTOCOL}")


_Instruction: TypeAlias = Callable[[_Machine, Any], object]

_COPIED: Final = (
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
# By the names that pickletools has for them; called with what follows the code.
_BY_NAME: Final[Mapping[str, _Instruction]] = {
    **dict.fromkeys(("NONE", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), _Machine.push_long),
    **dict.fromkeys(_COPIED, _Machine.push_copied),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, number: m.push(m.memo[number])),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.remember),
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    "PROTO": _require_protocol,
    "FRAME": lambda _, __: None,
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "LIST": lambda m, _: m.push(m.since_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "DICT": lambda m, _: m.push(_dict(m.since_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.take(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.take(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.take(3))),
    "APPEND": lambda m, _: m.extend(m.take(1)),
    "APPENDS": lambda m, _: m.extend(m.since_mark()),
    "SETITEM": lambda m, _: m.update(m.take(2)),
    "SETITEMS": lambda m, _: m.update(m.since_mark()),
    "MARK": _Machine.mark,
    "POP": lambda m, _: m.stack.pop() if m.stack else m.since_mark(),
    "POP_MARK": lambda m, _: m.since_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "GLOBAL": _Machine.push_symbol,
    "STACK_GLOBAL": lambda m, _: m.push_symbol(" ".join(m.take(2))),
    "REDUCE": lambda m, _: m.reduce(*m.take(2)),
    "BUILD": lambda m, _: m.build(*m.take(2)),
    "BINPERSID": lambda m, _: m.persist(*m.take(1)),
}
_BY_CODE: Final[Mapping[bytes, tuple[Callable[[Any], Any] | None, _Instruction]]] = {
    each.code.encode("latin-1"): (each.arg and each.arg.reader, _BY_NAME[each.name])
    for each in pickletools.opcodes
    if each.name in _BY_NAME
}
