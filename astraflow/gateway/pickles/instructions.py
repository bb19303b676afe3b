"""The instructions of a pickle, each a few words on the machine.

Those of protocols 0 to 5 that plain data is made of. Instructions that make objects of classes
(INST, OBJ, NEWOBJ, EXT and the like) are unknown, as is any name that is not in the table.
"""

from codecs import raw_unicode_escape_decode
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from astraflow.gateway.pickles.budget import refused
from astraflow.gateway.pickles.machine import Machine, pairs

Number = TypeVar("Number", int, float)

_TEXT_NBYTES: Final = 1 << 20
_STOP: Final = ord(".")


def run(machine: Machine) -> Any:
    """Run a pickle; return its value, in which whoever walks it finds what is no data.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    step, byte = machine.budget.step, machine.cursor.byte
    while True:
        step()
        code = byte()
        if code == _STOP:
            return machine.pop()
        instruction = _BY_CODE.get(code)
        if instruction is None:
            raise refused(f"instruction {bytes([code])!r} makes what is no plain data")
        instruction(machine)


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
_BY_CODE: Final = {code[0]: run for code, run in _BY_NAME.items()}
