"""Conversions between dataclasses and messages, derived from the names and types of their fields.

A field goes by its name. Its type is enough for numbers, texts, ids, enums, times, spans, nested
dataclasses, tuples, mappings and unions; what else there is to a field, a `FieldRule` says. A name
that only one side has fails at import. The functions are written as source, once, as `dataclasses`
does: they take no longer than ones written by hand.

A field that may be None goes with an optional field or a nested message; or with a text that is
empty, an enum that is unspecified then.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from math import inf
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from astraflow.wire.fields import (
    decode_span,
    decode_time,
    enum_table,
    invalid,
    required,
    set_time,
)

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Check = Callable[[Any, str], Any]
"""Given what was read and the name of its field, returns it, or raises INVALID_FIELD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """What the name and the type of a field do not say.

    Attributes:
        name: Of the message's field; empty: the same.
        check: Of what was read, unless that is None.
        most: Items of a repeated field, which are counted before one is read; 0: any number.
        encode: Makes the message's field, None leaves it unset; None: by the type.
        decode: Reads the message's field; None: by the type.
    """

    name: str = ""
    check: Check | None = None
    most: int = 0
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


_PASSES: dict[Check, str] = {required: "{}"}
"""What holds for a value that passes a check, as an expression of it."""


def least(bound: int) -> Check:
    """Return the check of a number that must not be below a bound."""

    def check(value: int, field: str) -> int:
        if value < bound:
            raise invalid(field, f"{value} is below {bound}")
        return value

    _PASSES[check] = f"{{}} >= {bound}"
    return check


_MOST_STEPS = 1 << 53


def step_count(value: int, field: str) -> int:
    """Check a number of optimizer steps: others are added to it, and it is plotted as a float."""
    if not 0 <= value <= _MOST_STEPS:
        raise invalid(field, f"{value} is no number of steps")
    return value


_PASSES[step_count] = f"0 <= {{}} <= {_MOST_STEPS}"


def rate(value: float, field: str) -> float:
    """Check a number of things per second."""
    if not 0 < value < inf:
        raise invalid(field, f"{value} is no rate")
    return value


_PASSES[rate] = "0 < {} < inf"


def _at_most(count: int) -> Check:
    """Return the check of a repeated field that must not have more items."""

    def check(items: Collection[Any], field: str) -> Collection[Any]:
        if len(items) > count:
            raise invalid(field, f"{len(items)} are more than {count}")
        return items

    return check


def sized(nbytes: int, *, or_none: bool = False) -> Check:
    """Return the check of bytes that have a size, or, perhaps, are empty."""

    def check(value: bytes, field: str) -> bytes:
        if len(value) != nbytes and (value or not or_none):
            raise invalid(field, f"needs {nbytes} bytes{', or none' if or_none else ''}")
        return value

    _PASSES[check] = f"len({{}}) in {(0, nbytes) if or_none else (nbytes,)}"
    return check


def converter(
    kind: type[Value],
    message: type[Wire],
    /,
    *,
    check: Callable[[Value], object] | None = None,
    without: Collection[str] = (),
    **rules: FieldRule | Check,
) -> tuple[Callable[[Value], Wire], Callable[[Wire], Value]]:
    """Return the functions that encode a dataclass and decode its message, also nested in others.

    `check` raises what is wrong with the whole, fields in `without` are of one side alone, and
    rules go by field of the dataclass, or by property that is sent and not read.

    Raises:
        TypeError: A name is on one side alone, or the types of a field do not go together.
    """
    made = _Pair(kind, message, check, frozenset(without), rules)
    _keep(kind, message, made)
    return made.encode, made.decode


def converted(
    kind: type[Value],
    message: type[Wire],
    encode: Callable[[Value], Wire],
    decode: Callable[[Wire], Value],
    *,
    fill: Callable[[Wire, Value], None] | None = None,
) -> None:
    """Have a dataclass that is nested in others converted by functions written by hand."""

    def copy(target: Message, value: Value) -> None:
        target.CopyFrom(encode(value))

    _keep(kind, message, _Functions(encode, decode, copy if fill is None else fill))


class _Functions(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]


_PAIRS: dict[tuple[type[Any], str], "_Functions | _Pair"] = {}

_SCALARS: Mapping[type[Any], Collection[int]] = {
    str: {FieldDescriptor.CPPTYPE_STRING},
    bytes: {FieldDescriptor.CPPTYPE_STRING},
    bool: {FieldDescriptor.CPPTYPE_BOOL},
    float: {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT},
    int: {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    },
}
_KNOWN: Mapping[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "google.protobuf.Timestamp": (datetime, decode_time, set_time),
    "google.protobuf.Duration": (timedelta, decode_span, Duration.FromTimedelta),
}


class _One(NamedTuple):
    """A value that is no container: expressions of `{0}`, and, of a message, what fills it."""

    read: str
    write: str
    fill: str


class _Pair:
    """Two functions, and how they are written."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]

    def __init__(
        self,
        kind: Any,
        message: Any,
        check: Callable[[Any], object] | None,
        without: frozenset[str],
        rules: Mapping[str, FieldRule | Check],
    ) -> None:
        self._what = f"{kind.__name__} and {message.DESCRIPTOR.full_name}"
        self._names: dict[str, Any] = {"inf": inf, "Kind": kind, "Message": message, "check": check}
        self._reads: list[str] = []
        self._writes: list[str] = []
        hints = get_type_hints(kind)
        own = {each.name for each in fields(kind) if each.init}
        unknown = {*message.DESCRIPTOR.fields_by_name} - without
        for name in [*sorted(own - without), *(name for name in rules if name not in own)]:
            rule = rules.get(name, FieldRule())
            rule = rule if isinstance(rule, FieldRule) else FieldRule(check=rule)
            found = self._found(message.DESCRIPTOR, rule.name or name)
            unknown -= {each.name for each in found}
            if name not in own:
                field, is_map = f"m.{found[0].name}", found[0].is_repeated
                self._writes.append(
                    f"{field}.update(v.{name})" if is_map else f"{field} = v.{name}"
                )
            else:
                self._add(name, hints[name], found, rule)
        if unknown:
            raise TypeError(f"{self._what}: the dataclass lacks {sorted(unknown)}")
        self._compile(kind, message)

    def _found(self, descriptor: Descriptor, name: str) -> list[FieldDescriptor]:
        """Return the message's field of a name, or the members of its oneof."""
        if name in descriptor.fields_by_name:
            return [descriptor.fields_by_name[name]]
        if name in descriptor.oneofs_by_name:
            return list(descriptor.oneofs_by_name[name].fields)
        raise TypeError(f"{self._what}: the message lacks {name}")

    def _compile(self, kind: Any, message: Any) -> None:
        made = f"Kind({', '.join(self._reads)})"
        source = [
            "def fill(m, v):",
            *(f"    {line}" for line in self._writes or ["pass"]),
            "def encode(v):",
            "    m = Message()",
            *(f"    {line}" for line in self._writes),
            "    return m",
            "def decode(m):",
            f"    v = {made}",
            *(["    check(v)"] if self._names["check"] is not None else []),
            "    return v",
        ]
        code = compile("\n".join(source), f"<{self._what}>", "exec")
        exec(code, self._names)  # noqa: S102 - of names of fields alone
        self.fill, self.encode, self.decode = map(self._names.get, ("fill", "encode", "decode"))  # pyright: ignore[reportAttributeAccessIssue]
        self.encode.__annotations__ = {"v": kind, "return": message}
        self.decode.__annotations__ = {"m": message, "return": kind}

    def _name(self, thing: object) -> str:
        name = f"_{len(self._names)}"
        self._names[name] = thing
        return name

    def _add(self, name: str, hint: Any, found: list[FieldDescriptor], rule: FieldRule) -> None:
        hint, is_optional = _bare(hint)
        first = found[0]
        field, own = f"m.{first.name}", f"v.{name}"
        if len(found) > 1 or _is_union(hint):
            read, writes = self._union(own, get_args(hint) or (hint,), found)
        elif rule.encode is not None and rule.decode is not None:
            read, writes = self._by_hand(field, own, first, rule)
        elif first.is_repeated:
            read, writes = self._repeated(field, own, hint, first)
            if rule.most:
                bound = f"{self._name(_at_most(rule.most))}({field}, {first.name!r})"
                read, _ = self._repeated(bound, own, hint, first)
        else:
            read, writes = self._single(field, own, hint, first)
        if rule.check is not None:
            # What is sound needs no call, which raises.
            passes = _PASSES.get(rule.check, "").format(f"(c := {read})")
            checked = f"{self._name(rule.check)}({'c' if passes else read}, {first.name!r})"
            read = f"(c if {passes} else {checked})" if passes else checked
        if is_optional and len(found) == 1:
            there = f"m.HasField({first.name!r})" if first.has_presence else field
            read = f"({read} if {there} else None)"
            if rule.encode is None:
                writes = [f"if {own} is not None:", *(f"    {line}" for line in writes)]
        self._reads.append(f"{name}={read}")
        self._writes += writes

    def _by_hand(
        self, field: str, own: str, found: FieldDescriptor, rule: FieldRule
    ) -> tuple[str, list[str]]:
        writes = [f"x = {self._name(rule.encode)}({own})"]
        if found.is_repeated:
            writes.append(f"{field}.extend(x)")
        elif found.message_type is not None:
            writes.append(f"if x is not None: {field}.CopyFrom(x)")
        else:
            writes.append(f"if x is not None: {field} = x")
        return f"{self._name(rule.decode)}({field})", writes

    def _single(
        self, field: str, own: str, hint: Any, found: FieldDescriptor
    ) -> tuple[str, list[str]]:
        one = self._one(hint, found)
        writes = [f"{field} = {one.write.format(own)}"]
        if one.fill:
            # A nested message that holds nothing is there.
            writes = [f"x = {field}", "x.SetInParent()", f"{one.fill}(x, {own})"]
        return one.read.format(field), writes

    def _repeated(
        self, field: str, own: str, hint: Any, found: FieldDescriptor
    ) -> tuple[str, list[str]]:
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (tuple, frozenset):
            return self._row(field, own, origin, self._one(parts[0], found))
        entry = found.message_type
        if entry is None or not entry.GetOptions().map_entry:
            raise TypeError(f"{self._what}: {found.name} is repeated, {hint} is not")
        key = self._one(parts[0], entry.fields_by_name["key"])
        value = self._one(parts[1], entry.fields_by_name["value"])
        if value.fill:
            writes = [f"for k, x in {own}.items(): {value.fill}({field}[k], x)"]
        else:
            writes = [f"if {own}: {field}.update({own})"]
        if (key.read, value.read) == ("{0}", "{0}"):
            return f"dict({field})", writes
        made = f"{key.read.format('k')}: {value.read.format('x')}"
        return f"{{{made} for k, x in {field}.items()}}", writes

    def _row(self, field: str, own: str, origin: Any, one: _One) -> tuple[str, list[str]]:
        plain = one.read == "{0}"
        read = field if plain else f"[{one.read.format('x')} for x in {field}]"
        if one.fill:
            return f"{origin.__name__}({read})", [f"for x in {own}: {one.fill}({field}.add(), x)"]
        row = own if plain else f"[{one.write.format('x')} for x in {own}]"
        row = f"sorted({row})" if origin is frozenset else row
        return f"{origin.__name__}({read})", [f"if {own}: {field}.extend({row})"]

    def _union(
        self, own: str, kinds: tuple[Any, ...], found: list[FieldDescriptor]
    ) -> tuple[str, list[str]]:
        """Return how one of several dataclasses goes into the oneof of their messages."""
        by_name = {cast("Descriptor", each.message_type).name: each for each in found}
        reads, writes = "None", [f"x = type({own})"]
        for kind in kinds:
            if kind is NoneType:
                continue
            if kind.__name__ not in by_name:
                raise TypeError(f"{self._what}: no member of the oneof is a {kind.__name__}")
            field = by_name[kind.__name__]
            one = self._one(kind, field)
            name = f"m.{field.name}"
            reads = f"{one.read.format(name)} if m.HasField({field.name!r}) else {reads}"
            writes += [
                f"if x is {self._name(kind)}:",
                f"    {name}.SetInParent()",
                f"    {one.fill}({name}, {own})",
            ]
        return reads, writes

    def _one(self, hint: Any, field: FieldDescriptor) -> _One:
        while hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        if field.enum_type is not None:
            table = enum_table(hint, field.enum_type)
            numbers, members = self._name(table.numbers), self._name(table.members)
            # A member is true; only a number without one is worth a call, which raises.
            refuse = f"{self._name(table.refuse)}({{0}}, {field.name!r})"
            decode = f"({members}.get({{0}}) or {refuse})"
            return _One(decode, f"{numbers}[{{0}}]", "")
        if field.message_type is None:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            if field.cpp_type not in _SCALARS.get(hint, ()) or is_bytes is not (hint is bytes):
                raise TypeError(f"{self._what}: {field.name} is no {hint}")
            return _One("{0}", "{0}", "")
        if field.message_type.full_name in _KNOWN:
            known, decode, fill = _KNOWN[field.message_type.full_name]
            if hint is not known:
                raise TypeError(f"{self._what}: {field.name} is no {hint}")
        else:
            pair = _pair(hint, field.message_type)
            decode, fill = pair.decode, pair.fill
        return _One(f"{self._name(decode)}({{0}})", "", self._name(fill))


def _keep(kind: type[Any], message: type[Message], made: "_Functions | _Pair") -> None:
    key = kind, message.DESCRIPTOR.full_name
    if key in _PAIRS:
        raise TypeError(f"{kind.__name__} is converted before its converter is made")
    _PAIRS[key] = made


def _pair(kind: Any, descriptor: Descriptor) -> "_Functions | _Pair":
    """Return the functions of a nested dataclass; one without rules needs no converter."""
    key = kind, descriptor.full_name
    if key not in _PAIRS:
        if not is_dataclass(kind):
            raise TypeError(f"{kind} is no dataclass for {descriptor.full_name}")
        _PAIRS[key] = _Pair(kind, GetMessageClass(descriptor), None, frozenset(), {})
    return _PAIRS[key]


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _bare(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether it may be None."""
    if not _is_union(hint):
        return hint, False
    rest = [part for part in get_args(hint) if part is not NoneType]
    is_optional = len(rest) < len(get_args(hint))
    return (rest[0] if len(rest) == 1 else hint), is_optional
