"""astraflow.journal.v1, snapshots: the state of a run as a graph of plain values.

Any object of the named modules is written by its attributes, so that a new rule of the hub needs
nothing here; a rollout as the message that it came in, which is most of a state. Objects that are
shared stay shared. No code is read back: a class is looked up among those modules, and never
called.

A later release reads it as far as it can be sure: a class that moved to another module is found by
its name, one that got another name by `RENAMED`, a new field of a dataclass has its default.
Whatever else differs is refused by its name.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from dis import get_instructions
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pkgutil import walk_packages
from struct import Struct
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError

from astraflow import __version__
from astraflow.core.algorithms.points import PlugIn
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Rollout
from astraflow.wire.fields import message_field, tag_of, varint
from astraflow.wire.rollout import read_rollout
from astraflow_proto.journal.v1 import snapshot_pb2 as pb

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_ABSENT = object()

RENAMED: Mapping[str, str] = {
    "astraflow.dataflow.memory:Memory": "astraflow.dataflow.members:MemberDirectory",
    "astraflow.dataflow.memory:Memory.roster": "history",
    "astraflow.dataflow.roster:Roster": "astraflow.dataflow.members:MemberHistory",
    "astraflow.dataflow.roster:Entry": "astraflow.dataflow.members:MemberRecord",
    "astraflow.core.algorithms.curation:Curator._selectors": "selectors",
    "astraflow.core.algorithms.curation:Mixing._counts": "counts",
    "astraflow.core.control.ending:Loading._served": "served",
    "astraflow.core.policy.buffers:FreshBuffer._nbytes": "nbytes",
    "astraflow.core.policy.buffers:FreshBuffer._sample_count": "sample_count",
    "astraflow.core.policy.buffers:ReplayBuffer._nbytes": "nbytes",
    "astraflow.core.policy.leases:LeaseTable._outcomes": "outcomes",
    "astraflow.core.policy.metrics:Window._rewards": "rewards",
    "astraflow.core.pool.capacity:Measured._count": "rollout_count",
    "astraflow.core.pool.live_members:CapacityIndex._changed": "changed",
    "astraflow.core.pool.sessions:Sessions._departed": "departed",
    "astraflow.core.pool.sessions:Sessions._members": "members",
    "astraflow.core.pool.sessions:Sessions._pool": "pool",
    "astraflow.core.pool.sessions:Sessions._trainers": "trainers",
    "astraflow.core.versions:VersionLedger._next": "next_version",
    "astraflow.core.versions:VersionLedger._shown": "shown_version",
    "astraflow.core.work.eval_work:EvalWork._prompts": "prompts",
    "astraflow.core.work.evaluation:Evaluation._active": "active",
    "astraflow.core.work.pacing:Barrier._given_up": "given_up",
    "astraflow.core.work.pacing:Barrier._waited_since": "waited_since",
    "astraflow.core.work.saving:Saving._asked": "asked",
    "astraflow.core.work.training:Training._policy_ids": "policy_ids",
}
"""Classes, `module:Class`, and attributes, `module:Class.attribute`, that have another name now."""

LEFT_OUT = frozenset(
    {"astraflow.core.rollouts:Rollout.received", "astraflow.core.rollouts:Trajectory.received"}
)
"""Attributes, as in RENAMED, that say again what others do; they have their defaults once read."""

# A class, the attributes that its nodes have, and what makes the others.
_Plan = tuple[type[Any], tuple[str, ...], tuple[tuple[str, Callable[[], Any]], ...]]

# What a node begins with, and its values.
_Apart = tuple[bytes, Iterable[Any]]


def dump_state(root: object, *, position: int, modules: tuple[str, ...]) -> bytes:
    """Return a snapshot of an object of these modules; record `position` is the next one."""
    writer = _Writer(modules)
    writer.add(root)
    head = pb.Snapshot(position=position, software=__version__, shapes=writer.shapes)
    return b"".join([head.SerializeToString(), *writer.nodes])


def load_state(data: bytes, *, modules: tuple[str, ...]) -> tuple[Any, int]:
    """Return the object of a snapshot, and the position of the first record not in it."""
    try:
        snapshot = pb.Snapshot.FromString(data)
        return _Reader(snapshot, modules).node(0), snapshot.position
    except (
        AstraflowError,
        DecodeError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"the snapshot of the journal cannot be read ({error}); open it with the release that "
            "wrote it",
        ) from error


class _Writer:
    """Writes a state piece by piece, which takes half as long as to make messages of it.

    Attributes:
        shapes: Of the nodes.
        nodes: Each as a serialized Snapshot has it.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.shapes: list[pb.Shape] = []
        self.nodes: list[bytes] = []
        self._modules = modules
        self._heads: dict[tuple[str, ...], bytes] = {}
        self._numbers: dict[int, int] = {}
        self._texts: dict[str, bytes] = {}
        self._classes: dict[type[Any], tuple[str, list[str]]] = {}
        # Classes of which an object had all its attributes in slots: what its node begins with, and
        # what gets them.
        self._whole: dict[type[Any], tuple[bytes, Callable[[Any], tuple[Any, ...]]]] = {}
        # Trajectories by identity, and their places in rollouts that are written as messages.
        self._parts: dict[int, tuple[Rollout, int]] = {}
        # Whoever is written must live until the end: numbers go by identity.
        self._kept: list[object] = []

    def add(self, thing: object) -> int:
        """Write an object once; return its number."""
        number = self._numbers.get(id(thing))
        if number is not None:
            return number
        number = self._numbers[id(thing)] = len(self._numbers)
        self._kept.append(thing)
        # Children take their places behind.
        self.nodes.append(b"")
        head, values = self._taken_apart(thing)
        value = self._value
        pieces = [head, *[value(each) for each in values]]
        self.nodes[number] = b"".join(message_field(_NODES, pieces))
        return number

    def _head(self, *key: str) -> bytes:
        """Return what a node begins with, by its kind and the names of its attributes."""
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = pb.Node(shape=len(self.shapes)).SerializeToString()
            self.shapes.append(pb.Shape(kind=key[0], names=key[1:]))
        return head

    def _value(self, value: Any) -> bytes:
        """Return a value as a serialized Node has it."""
        kind = cast("type[Any]", type(value))
        if kind is str:
            # The same few thousand names stand everywhere.
            known = self._texts.get(value)
            if known is None:
                known = self._texts[value] = _field(pb.Value(text=value))
            return known
        make = _PLAIN.get(kind)
        if make is None or (kind is int and not -(1 << 63) <= value < 1 << 63):
            return b"".join(message_field(_VALUES, [_NODE, varint(self.add(value))]))
        return make(value)

    def _taken_apart(self, thing: Any) -> _Apart:  # noqa: PLR0911 - one line per kind
        kind = cast("type[Any]", type(thing))
        head = self._head
        if kind in _CONTAINERS:
            return head(_CONTAINERS[kind]), thing
        if kind in (set, frozenset):
            return head(kind.__name__), sorted(thing, key=repr)
        if kind is deque:
            return head("deque"), (thing.maxlen, *thing)
        if kind in (dict, Counter):
            return head(kind.__name__.lower()), [part for item in thing.items() for part in item]
        if isinstance(thing, datetime):
            return head("time"), ((thing - _EPOCH) // _MICROSECOND,)
        if kind is timedelta:
            return head("span"), (thing // _MICROSECOND,)
        if kind is np.ndarray:
            return head("array"), _array_parts(thing)
        if kind is int:
            return head("int"), (str(thing),)
        if id(thing) in self._parts:
            return head("trajectory"), self._parts[id(thing)]
        if kind is Rollout and thing.received is not None:
            trajectories = {id(each): (thing, at) for at, each in enumerate(thing.trajectories)}
            if self._numbers.keys().isdisjoint(trajectories):
                self._parts |= trajectories
                return head("rollout"), (thing.received,)
        return self._of_ours(thing)

    def _of_ours(self, thing: Any) -> _Apart:
        kind = cast("type[Any]", type(thing))
        if kind in self._whole:
            head, get = self._whole[kind]
            with suppress(AttributeError):
                return head, get(thing)
        path, slots = self._classes.get(kind) or self._class(kind)
        if isinstance(thing, Enum):
            return self._head(path, "name"), (thing.name,)
        held = {name: getattr(thing, name, _ABSENT) for name in slots}
        held |= getattr(thing, "__dict__", {})
        there = {name: value for name, value in held.items() if value is not _ABSENT}
        head = self._head(path, *there)
        if list(there) == slots and len(slots) > 1 and not hasattr(thing, "__dict__"):
            self._whole[kind] = head, attrgetter(*slots)
        return head, there.values()

    def _class(self, kind: type[Any]) -> tuple[str, list[str]]:
        """Return what stands for a class, and the slots of its objects."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        if not path.startswith(self._modules) and not issubclass(kind, PlugIn):
            raise AstraflowError(
                Reason.JOURNAL_FAILED, f"the state holds a {path}, which has no plain value"
            )
        names = [name for name in _names(kind) if f"{path}.{name}" not in LEFT_OUT]
        self._classes[kind] = path, names
        return self._classes[kind]


def _array_parts(values: np.ndarray) -> tuple[Any, ...]:
    return (values.dtype.str, values.tobytes(), *values.shape)


def _names(kind: type[Any]) -> list[str]:
    """Return the slots of a class and its bases."""
    names: list[str] = []
    for base in kind.__mro__:
        slots: Any = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


_NODES, _VALUES = tag_of(pb.Snapshot, "nodes"), tag_of(pb.Node, "values")


def _field(value: pb.Value) -> bytes:
    return b"".join(message_field(_VALUES, [value.SerializeToString()]))


@lru_cache(maxsize=1 << 16)
def _whole(value: int) -> bytes:
    return _field(pb.Value(whole=value))


_NODE = pb.Value(node=1).SerializeToString()[:-1]
_DOUBLE = Struct("<d")
_REAL = _field(pb.Value(real=0.0))[: -_DOUBLE.size]
_NONE = _field(pb.Value(none=True))
_TRUTHS = _field(pb.Value(truth=False)), _field(pb.Value(truth=True))
_PLAIN: Mapping[type[Any], Callable[[Any], bytes]] = {
    type(None): lambda _: _NONE,
    bool: _TRUTHS.__getitem__,
    int: _whole,
    float: lambda value: _REAL + _DOUBLE.pack(value),
    bytes: lambda value: _field(pb.Value(data=value)),
}
_CONTAINERS: Mapping[type[Any], str] = {list: "list", tuple: "tuple"}


class _Reader:
    def __init__(self, snapshot: pb.Snapshot, modules: tuple[str, ...]) -> None:
        self._nodes = snapshot.nodes
        self._shapes = [(shape.kind, tuple(shape.names)) for shape in snapshot.shapes]
        self._modules = modules
        self._made: dict[int, Any] = {}
        self._plans: dict[int, _Plan] = {}

    def node(self, number: int) -> Any:
        """Return the object with this number."""
        if number not in self._made:
            node = self._nodes[number]
            kind, _ = self._shapes[node.shape]
            make = _FILLED.get(kind)
            if make is not None:
                self._made[number] = made = make()
                _fill(kind, made, [self._value(value) for value in node.values])
            elif kind in _BUILT:
                self._made[number] = _BUILT[kind]([self._value(v) for v in node.values])
            else:
                self._make_ours(number, node)
        return self._made[number]

    def _value(self, message: pb.Value) -> Any:
        field = message.WhichOneof("value")
        if field == "node":
            return self.node(message.node)
        return None if field == "none" else getattr(message, field)

    def _make_ours(self, number: int, node: pb.Node) -> None:
        plan = self._plans.get(node.shape)
        if plan is None:
            plan = self._plans[node.shape] = self._plan(*self._shapes[node.shape])
        kind, names, gained = plan
        if issubclass(kind, Enum):
            self._made[number] = kind[node.values[0].text]
            return
        made = self._made[number] = object.__new__(kind)
        for name, value in zip(names, node.values, strict=True):
            object.__setattr__(made, name, self._value(value))
        for name, make in gained:
            object.__setattr__(made, name, make())

    def _plan(self, path: str, names: tuple[str, ...]) -> _Plan:
        """Return what to make of the nodes of a shape."""
        kind = self._found(RENAMED.get(path, path))
        here = f"{kind.__module__}:{kind.__qualname__}"
        if not (here.startswith(self._modules) or issubclass(kind, PlugIn)):
            raise LookupError(f"{path} is no part of a run's state")
        names = tuple(RENAMED.get(f"{path}.{name}", name) for name in names)
        if is_dataclass(kind):
            return kind, names, _gained(kind, names)
        missing = () if issubclass(kind, Enum) else _assigned(kind).difference(names)
        if missing:
            missed = ", ".join(sorted(missing))
            raise LookupError(f"{path} has gained {missed} in release {__version__}")
        return kind, names, ()

    def _found(self, path: str) -> type[Any]:
        """Return a class by its path, or by its name where it moved to another module."""
        module, _, name = path.partition(":")
        found = _member(module, name)
        if found is None:
            floors = (each.rstrip(".") for each in self._modules if each.endswith("."))
            others = {_member(other, name) for floor in floors for other in _modules_of(floor)}
            found = next(iter(others - {None}), None) if len(others - {None}) == 1 else None
        if found is None:
            raise LookupError(f"there is no {path} in release {__version__}")
        return found


def _member(module: str, name: str) -> type[Any] | None:
    """Return the class that a module defines under a name; None: it does not."""
    try:
        kind: Any = import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        kind = getattr(kind, part, None)
    return kind if isinstance(kind, type) else None


def _modules_of(package: str) -> Iterable[str]:
    """Return the modules of a package, by name."""
    path = import_module(package).__path__
    return (each.name for each in walk_packages(path, f"{package}."))


@cache
def _assigned(kind: type[Any]) -> frozenset[str]:
    """Return the attributes that the constructors of a class give to its instances."""
    names: set[str] = set()
    for base in kind.__mro__:
        make = base.__dict__.get("__init__")
        code = getattr(make, "__code__", None)
        steps = list(get_instructions(code)) if code is not None else []
        names |= {
            step.argval
            for before, step in pairwise(steps)
            if step.opname == "STORE_ATTR" and _ends_with_self(before.argval)
        }
    return frozenset(names)


def _ends_with_self(loaded: object) -> bool:
    """Whether what an instruction loads last is `self`: since Python 3.13 one may load two."""
    several = cast("tuple[object, ...]", loaded) if isinstance(loaded, tuple) else (loaded,)
    return several[-1] == "self"


def _gained(kind: Any, names: tuple[str, ...]) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Return what a class has gained since an older release, and makes of its defaults."""
    gained = [field for field in fields(kind) if field.name not in names]
    made: list[tuple[str, Callable[[], Any]]] = []
    for field in gained:
        if field.default_factory is not MISSING:
            made.append((field.name, field.default_factory))
        elif field.default is not MISSING:
            made.append((field.name, lambda value=field.default: value))
    return tuple(made)


def _fill(kind: str, made: Any, values: list[Any]) -> None:
    match kind:
        case "list":
            made.extend(values)
        case "set":
            made.update(values)
        case _:
            # Not update(): that of a Counter adds.
            for key, value in zip(values[::2], values[1::2], strict=True):
                made[key] = value


def _array(values: list[Any]) -> np.ndarray:
    dtype, data, *shape = values
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


_FILLED: Mapping[str, Callable[[], Any]] = {
    "list": list,
    "set": set,
    "dict": dict,
    "counter": Counter,
}
_BUILT: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "deque": lambda values: deque(values[1:], maxlen=values[0]),
    "time": lambda values: _EPOCH + values[0] * _MICROSECOND,
    "span": lambda values: values[0] * _MICROSECOND,
    "array": _array,
    "rollout": lambda values: read_rollout(values[0])[0],
    "trajectory": lambda values: values[0].trajectories[values[1]],
    "int": lambda values: int(values[0]),
}
