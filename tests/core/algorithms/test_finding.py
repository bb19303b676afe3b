from dataclasses import dataclass, field

import pytest

from astraflow.core.algorithms import finding
from astraflow.core.algorithms.points import Dice, PromptSelector, RolloutFilter
from astraflow.core.algorithms.selection import Greso
from astraflow.core.code import installed
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.settings import PlugInSpec

HERE = __name__


@dataclass
class EveryOther(PromptSelector):
    start: bool = True
    weights: tuple[float, ...] = ()
    limit: int | None = None
    seen: int = field(default=0, init=False)

    def __post_init__(self):
        if self.limit == 0:
            raise ValueError("limit must not be 0")


class NoDataclass(PromptSelector):
    pass


def make(name, **options):
    return finding.make(PromptSelector, PlugInSpec(name=name, options=options))


def refused(name, **options):
    with pytest.raises(AstraflowError) as caught:
        make(name, **options)
    return caught.value


@pytest.mark.parametrize("point", finding.Point)
def test_everything_built_in_can_be_made(point):
    needed = {"route": {"policies": {}}}
    base = finding.BASES[point]
    for name in finding.names(point):
        spec = PlugInSpec(name=name, options=needed.get(name, {}))
        made = finding.make(base, spec)
        assert isinstance(made, base)
        assert all(isinstance(value, float) for value in made.metrics().values())


def test_options_are_fields():
    greso = make("greso", min_submit_easy=0.05, p_max=1)
    assert isinstance(greso, Greso)
    assert (greso.min_submit_easy, greso.p_max) == (0.05, 1.0)


def test_algorithms_of_others_are_named_by_module_and_class():
    made = make(f"{HERE}:EveryOther", weights=[1, 2.5], limit=None)
    assert made == EveryOther(weights=(1.0, 2.5))


def test_installed_packages_add_names(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "from dataclasses import dataclass\n"
        "from astraflow.core.algorithms.points import PromptSelector\n"
        "@dataclass\n"
        "class Theirs(PromptSelector):\n"
        "    share: float = 0.5\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "[astraflow.prompt_selectors]\ntheirs = theirs:Theirs\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    try:
        assert make("theirs", share=1).share == 1.0
        assert "theirs" in finding.names(finding.Point.SELECTOR)
    finally:
        installed.cache_clear()


def test_mistakes_are_named():
    assert "did you mean greso?" in refused("gresso").message
    assert "did you mean min_submit_easy?" in refused("greso", min_submit_eesy=1).message
    assert "option 'p_max' is 'x', not float" in refused("greso", p_max="x").message
    assert "p_max must be at most 1" in refused("greso", p_max=2).message
    assert "limit must not be 0" in refused(f"{HERE}:EveryOther", limit=0).message
    assert "not int or NoneType" in refused(f"{HERE}:EveryOther", limit="x").message
    assert "no option 'seen'" in refused(f"{HERE}:EveryOther", seen=1).message
    route = PlugInSpec(name="route", options={"policies": {"a": [{"foo": 1}]}})
    with pytest.raises(AstraflowError, match="rule 0 of a: there is no option 'foo'"):
        finding.make(RolloutFilter, route)
    with pytest.raises(AstraflowError, match="option 'policies' is missing"):
        finding.make(RolloutFilter, PlugInSpec(name="route"))


def test_what_is_no_algorithm_is_refused():
    error = refused(f"{HERE}:NoDataclass")
    assert error.reason is Reason.CODE_UNKNOWN
    assert "make it a dataclass" in error.message
    assert "cannot be loaded" in refused("nowhere:Thing").message
    with pytest.raises(AstraflowError, match="with the base RolloutFilter"):
        finding.make(RolloutFilter, PlugInSpec(name=f"{HERE}:EveryOther"))


def test_dice_repeat_themselves():
    rolls = [[Dice(seed=seed, salt="a").roll() for _ in range(2)] for seed in (1, 1, 2)]
    assert rolls[0] == rolls[1] != rolls[2]
    dice = Dice(seed=1, salt="a")
    many = [dice.roll() for _ in range(2000)]
    assert len(set(many)) == 2000
    assert all(0 <= roll < 1 for roll in many)
    assert 0.47 < sum(many) / 2000 < 0.53
