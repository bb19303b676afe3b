"""The machine that reads a pickle: a stack, marks, a memo, and a table of what names stand for."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast

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

_KEYS: Final = (str, bytes, bool, type(None))


class Symbolic:
    """A symbol on the stack: no value of a result."""

    __slots__ = ("call",)

    def __init__(self, call: Symbol) -> None:
        self.call = call


class Machine:
    """What the instructions of one pickle work on.

    Attributes:
        cursor: At the next instruction.
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
