"""The interpreter: a stack, marks and a memo; what a name means is looked up in a table.

It knows the instructions of protocols 0 to 5 that plain data is made of. Instructions that make
objects of classes (INST, OBJ, NEWOBJ, EXT and the like) are unknown to it, as is any name that
is not in the table.
"""

from codecs import raw_unicode_escape_decode
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from astraflow.gateway.pickles.budget import Budget, refused, require_tuple
from astraflow.gateway.pickles.cursor import Cursor


class Symbol(Protocol):
    """What stands for a name of the table; called with arguments that it checks itself."""

    def __call__(self, budget: Budget, arguments: tuple[Any, ...], /) -> Any:
        """Return the value that a REDUCE makes."""
        ...


class Buildable(Protocol):
    """A value that takes a state once."""

    def build(self, budget: Budget, state: Any, /) -> None:
        """Take the state."""
        ...


Table: TypeAlias = Mapping[tuple[str, str], Symbol]
Number = TypeVar("Number", int, float)

_KEYS: Final = (str, bytes, bool, type(None))
_TEXT_NBYTES: Final = 1 << 20


class Symbolic:
    """A symbol on the stack: no value of a result."""

    __slots__ = ("call",)

    def __init__(self, call: Symbol) -> None:
        self.call = call


class Machine:
    """Runs one pickle.

    Attributes:
        cursor: Stands after the STOP once it ran.
        stack: Values above the last mark.
        memo: Values by number.
    """

    def __init__(
        self,
        cursor: Cursor,
        budget: Budget,
        table: Table,
        *,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        """Prepare.

        Args:
            cursor: At the first instruction.
            budget: Of the body.
            table: What names stand for.
            persistent: What a persistent id stands for; None: there are none.
        """
        self.cursor = cursor
        self.budget = budget
        self.table = table
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._below: list[list[Any]] = []

    def run(self) -> Any:
        """Return the value; symbols in it are found by whoever walks it.

        Raises:
            AstraflowError: INVALID_FIELD.
        """
        step, byte = self.budget.step, self.cursor.byte
        while True:
            step()
            code = byte()
            if code == _STOP:
                return self.pop()
            instruction = INSTRUCTIONS.get(code)
            if instruction is None:
                raise refused(f"instruction {bytes([code])!r} makes what is no plain data")
            instruction(self)

    def push(self, value: Any) -> None:
        """Put a value on top."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Take the value on top."""
        if not self.stack:
            raise refused("it takes a value where there is none")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the value on top."""
        if not self.stack:
            raise refused("it needs a value where there is none")
        return self.stack[-1]

    def mark(self) -> None:
        """Begin a list of values."""
        self._below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark."""
        if not self._below:
            raise refused("a mark is missing")
        values, self.stack = self.stack, self._below.pop()
        return values

    def pop_any(self) -> None:
        """Drop the value on top, or the mark where there is none above it."""
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def recall(self, number: int) -> None:
        """Push what was remembered."""
        if number not in self.memo:
            raise refused(f"nothing was remembered as {number}")
        self.push(self.memo[number])

    def remember(self, number: int) -> None:
        """Remember the value on top."""
        self.memo[number] = self.top()

    def push_text(self, raw: memoryview) -> None:
        """Push a string."""
        try:
            self.push(str(raw, "utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise refused("a string of it is not UTF-8") from None

    def tuple_of(self, count: int) -> None:
        """Replace the values on top by a tuple of them."""
        if len(self.stack) < count:
            raise refused("it takes a value where there is none")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, values: list[Any]) -> None:
        """Append to the list on top."""
        target = self.top()
        if type(target) is not list:
            raise refused("it appends to what is no list")
        cast("list[Any]", target).extend(values)

    def update(self, values: list[Any]) -> None:
        """Add keys and values to the dict on top."""
        target = self.top()
        if type(target) is not dict or len(values) % 2:
            raise refused("it sets items of what is no dict")
        cast("dict[Any, Any]", target).update(pairs(values))

    def name(self, module: str, name: str) -> None:
        """Push what a name stands for."""
        symbol = self.table.get((module, name))
        if symbol is None:
            raise refused(f"it names {module}.{name}, which is not on the list of what is read")
        self.push(Symbolic(symbol))

    def reduce(self) -> None:
        """Call a symbol."""
        arguments, target = self.pop(), self.pop()
        if not isinstance(target, Symbolic):
            raise refused("it calls what is no name")
        self.push(target.call(self.budget, require_tuple(arguments, "arguments are no tuple")))

    def build(self) -> None:
        """Give a value its state."""
        state, target = self.pop(), self.top()
        if not hasattr(target, "build"):
            raise refused("it gives a state to what takes none")
        target.build(self.budget, state)

    def persist(self, name: Any) -> None:
        """Push what a persistent id stands for."""
        if self.persistent is None:
            raise refused("it has persistent ids")
        self.push(self.persistent(name))


def pairs(values: list[Any]) -> dict[Any, Any]:
    """Return a dict of keys and values in turn.

    Raises:
        AstraflowError: INVALID_FIELD for a key that is no text, bytes or small whole number:
            tuples within tuples take for ever to hash, and others can be made to collide.
    """
    keys = values[::2]
    if len(values) % 2 or not all(map(_is_key, keys)):
        raise refused("a key of a dict is no text or number")
    return dict(zip(keys, values[1::2], strict=True))


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 31)


def _text_int(line: bytes) -> int | bool:
    """Read INT, whose 00 and 01 are booleans."""
    if line in (b"00", b"01"):
        return line == b"01"
    return _number(int, line)


def _text_long(line: bytes) -> int:
    return _number(int, line.removesuffix(b"L"))


def _number(kind: Callable[[bytes], Number], line: bytes) -> Number:
    try:
        return kind(line)
    except ValueError:
        raise refused(f"{line[:32]!r} is no number") from None


def _names(m: Machine) -> tuple[str, str]:
    module, name = m.cursor.line(256), m.cursor.line(256)
    return module.decode("latin-1"), name.decode("latin-1")


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise refused("a name of it is no text")
    m.name(module[:256], name[:256])


def _raw_unicode(m: Machine) -> None:
    # str.decode would import the codec.
    m.push(raw_unicode_escape_decode(m.cursor.line(_TEXT_NBYTES))[0])


def _bytes(m: Machine, count: int) -> None:
    m.budget.spend(count)
    m.push(bytes(m.cursor.take(count)))


def _text(m: Machine, count: int) -> None:
    m.budget.spend(count)
    m.push_text(m.cursor.take(count))


def _long(m: Machine, count: int) -> None:
    if count > 16:
        raise refused("it has a number of more than 16 bytes")
    m.push(m.cursor.sint(count))


def _proto(m: Machine) -> None:
    if m.cursor.byte() > 5:
        raise refused("it is of a protocol after 5")


_STOP: Final = ord(".")

_BY_NAME: Final[Mapping[bytes, Callable[[Machine], object]]] = {
    b"\x80": _proto,
    b"\x95": lambda m: m.cursor.take(8),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": lambda m: m.push(_text_int(m.cursor.line())),
    b"L": lambda m: m.push(_text_long(m.cursor.line())),
    b"J": lambda m: m.push(m.cursor.sint(4)),
    b"K": lambda m: m.push(m.cursor.byte()),
    b"M": lambda m: m.push(m.cursor.uint(2)),
    b"\x8a": lambda m: _long(m, m.cursor.byte()),
    b"\x8b": lambda m: _long(m, m.cursor.uint(4)),
    b"F": lambda m: m.push(_number(float, m.cursor.line())),
    b"G": lambda m: m.push(m.cursor.double()),
    b"V": _raw_unicode,
    b"\x8c": lambda m: _text(m, m.cursor.byte()),
    b"X": lambda m: _text(m, m.cursor.uint(4)),
    b"\x8d": lambda m: _text(m, m.cursor.uint(8)),
    b"C": lambda m: _bytes(m, m.cursor.byte()),
    b"B": lambda m: _bytes(m, m.cursor.uint(4)),
    b"\x8e": lambda m: _bytes(m, m.cursor.uint(8)),
    b"\x96": lambda m: _bytes(m, m.cursor.uint(8)),
    b"(": Machine.mark,
    b"0": Machine.pop_any,
    b"1": lambda m: m.since_mark(),
    b"2": lambda m: m.push(m.top()),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"l": lambda m: m.push(m.since_mark()),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"d": lambda m: m.push(pairs(m.since_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.since_mark()),
    b"s": lambda m: m.update([m.pop(), m.pop()][::-1]),
    b"u": lambda m: m.update(m.since_mark()),
    b"g": lambda m: m.recall(_number(int, m.cursor.line())),
    b"h": lambda m: m.recall(m.cursor.byte()),
    b"j": lambda m: m.recall(m.cursor.uint(4)),
    b"p": lambda m: m.remember(_number(int, m.cursor.line())),
    b"q": lambda m: m.remember(m.cursor.byte()),
    b"r": lambda m: m.remember(m.cursor.uint(4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"c": lambda m: m.name(*_names(m)),
    b"\x93": _stack_global,
    b"R": Machine.reduce,
    b"b": Machine.build,
    b"Q": lambda m: m.persist(m.pop()),
}
INSTRUCTIONS: Final = {code[0]: run for code, run in _BY_NAME.items()}
