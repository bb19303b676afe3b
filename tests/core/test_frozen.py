from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace

import pytest

from astraflow.core import frozen
from astraflow.core.frozen import fast_init


def _made(*, is_fast):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Span:
        version: int
        length: int = 1
        names: list[str] = field(default_factory=list[str])
        total: int = field(init=False)
        source: bytes | None = field(init=False, default=None)
        seen: set[int] = field(init=False, default_factory=set[int])

        def __post_init__(self) -> None:
            if self.length < 1:
                raise ValueError("no length")
            object.__setattr__(self, "total", self.version + self.length)

    return fast_init(Span) if is_fast else Span


@pytest.fixture(params=[False, True], ids=["its own", "fast"])
def span(request):
    return _made(is_fast=request.param)


@pytest.mark.skipif(frozen.fill is None, reason="astraflow.core._frozen was not built")
def test_the_constructor_is_another_one():
    assert _made(is_fast=True).__init__ is not _made(is_fast=False).__init__
    assert "_made" in _made(is_fast=True).__init__.__qualname__


def test_fields_have_what_they_were_given_or_their_defaults(span):
    one, two = span(version=3), span(version=4, length=2, names=["a"])
    told = {"names": [], "source": None, "seen": set()}
    assert asdict(one) == told | {"version": 3, "length": 1, "total": 4}
    assert asdict(two) == told | {"version": 4, "length": 2, "total": 6, "names": ["a"]}
    assert one.names is not span(version=3).names
    assert one.seen is not span(version=3).seen


def test_it_is_equal_hashed_shown_and_replaced_by_its_fields(span):
    one = span(version=3, length=2)
    assert one == span(version=3, length=2)
    assert one != span(version=3)
    assert repr(one).endswith(
        "Span(version=3, length=2, names=[], total=5, source=None, seen=set())"
    )
    assert replace(one, version=5).total == 7


def test_it_is_frozen_and_checked(span):
    one = span(version=3)
    with pytest.raises(FrozenInstanceError):
        one.version = 4
    with pytest.raises(ValueError, match="no length"):
        span(version=3, length=0)


def test_what_is_missing_unknown_or_without_a_name_is_refused(span):
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'version'"):
        span()
    with pytest.raises(TypeError, match="unexpected keyword argument 'seen'"):
        span(version=1, seen={1})
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        span(1)


@pytest.mark.skipif(frozen.fill is None, reason="astraflow.core._frozen was not built")
@pytest.mark.parametrize("given", [(), (object(),), (object(), ["a"], 1), (object(), ("a",))])
def test_fields_are_not_filled_with_something_else(given):
    with pytest.raises(TypeError, match="as many values"):
        frozen.fill(*given)


def test_without_the_extension_a_class_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(frozen, "fill", None)
    kind = _made(is_fast=False)
    own = kind.__init__
    assert fast_init(kind).__init__ is own
