import json

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.telemetry.traces import (
    OtelRecorder,
    configure_tracing,
    context_below,
    group_context,
    is_tracing,
    record,
    span,
    use_recorder,
)

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    use_recorder(OtelRecorder(exporter, role="test", at_once=True))
    yield exporter
    use_recorder(None)


def test_nothing_is_traced_unless_asked_for():
    assert not is_tracing()
    assert group_context("run", "g1") == ""
    with span("rl.sample", parent="00-1-2-01") as context:
        assert context == "00-1-2-01"


def test_spans_below_a_group_share_its_trace(spans):
    root = group_context("run", "g1")
    record("rl.prompt", context=root, start_ns=1, end_ns=2, rl__run__id="run")
    with span("rl.sample", parent=root) as outer, span("gen_ai.generate"):
        pass
    record("rl.accept", parent=outer, start_ns=3)
    first, inner, middle, last = spans.get_finished_spans()
    assert [first.name, middle.name] == ["rl.prompt", "rl.sample"]
    assert first.parent is None
    assert first.attributes == {"rl.run.id": "run"}
    assert {each.context.trace_id for each in (first, inner, middle, last)} == {int(root[3:35], 16)}
    assert inner.parent.span_id == last.parent.span_id == middle.context.span_id


def test_a_context_is_the_same_after_a_restart(spans):
    root = group_context("run", "g1")
    assert root == group_context("run", "g1") != group_context("run", "g2")
    assert context_below(root, "t1") == context_below(root, "t1") != context_below(root, "t2")


def test_a_span_says_why_it_failed(spans):
    with pytest.raises(ValueError, match="no"), span("rl.reward", parent=group_context("r", "g")):
        raise ValueError("no")
    (failed,) = spans.get_finished_spans()
    assert failed.status.description == "ValueError('no')"


@pytest.mark.parametrize("parent", ["x", "00-zz", f"00-{32 * 'g'}-{16 * '1'}-01", "00-" + 60 * "1"])
def test_below_what_is_no_context_nothing_is_recorded(spans, parent):
    """It comes with a rollout, from anybody's node."""
    record("rl.accept", parent=parent, start_ns=1)
    assert spans.get_finished_spans() == ()


def test_a_share_of_the_groups_is_traced(spans):
    use_recorder(OtelRecorder(spans, role="test", at_once=True), share=0.25)
    traced = [bool(group_context("run", f"g{n}")) for n in range(400)]
    assert 60 < sum(traced) < 140
    record("rl.accept", start_ns=1)
    assert spans.get_finished_spans() == ()


def test_spans_go_to_a_file(tmp_path):
    configure_tracing("hub", exporter="file", folder=tmp_path)
    record("rl.prompt", context=group_context("run", "g1"), start_ns=1)
    use_recorder(None)
    (file,) = tmp_path.iterdir()
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["name"] == "rl.prompt"


def test_an_exporter_that_is_not_installed_is_named():
    with pytest.raises(AstraflowError, match=r"there are .* and off, file, console") as caught:
        configure_tracing("hub", exporter="nowhere")
    assert caught.value.reason is Reason.INVALID_FIELD
