"""Pictures: two drawn by hand, and every action of larger ones once, in its place."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lib.pipeline.drawing import as_svg, as_text
from lib.pipeline.schedule import training_plan
from lib.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(stages, chunks, micro_batches, **costs):
    plans = [training_plan(stage, stages, chunks, micro_batches) for stage in range(stages)]
    return simulate(plans, Costs.uniform(stages * chunks, **costs))


def test_text_drawn_by_hand():
    assert as_text(timeline_of(2, 1, 2), 100).splitlines() == [
        "stage 0 F0-F1-......B0====...B1====",
        "stage 1 ...F0-B0====F1-B1====......",
    ]
    assert as_text(timeline_of(1, 2, 1, backward=1.0), 100) == "stage 0 F0.0-F0.1-B0.1=B0.0="


def test_a_wide_text_goes_on_below():
    timeline = timeline_of(2, 1, 6)  # 21 units of 3 columns
    whole = as_text(timeline, 100).splitlines()
    bands = as_text(timeline, 28).split("\n\n")  # of 20 columns
    for stage in range(2):
        rows = [band.splitlines()[stage].removeprefix(f"stage {stage} ") for band in bands]
        assert [len(row) for row in rows] == [20, 20, 20, 3]
        assert f"stage {stage} " + "".join(rows) == whole[stage]


def test_a_very_wide_text_is_cut_and_says_so():
    lines = as_text(timeline_of(1, 1, 12), 1).splitlines()  # 36 units of 4 columns, bands of 20
    assert [len(line) for line in lines if line.startswith("stage")] == [28] * 4
    assert lines[-1] == "(64 more columns are cut off)"


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(4, 1, 6), (2, 3, 11), (11, 1, 1)])
def test_every_action_is_in_the_text_in_the_order_of_the_plan(stages, chunks, micro_batches):
    timeline = timeline_of(stages, chunks, micro_batches, backward=1.7)
    for stage, line in enumerate(as_text(timeline, 10_000).splitlines()):
        head, row = line[:9].rstrip(), line[8:].lstrip()
        assert head.startswith(f"stage {stage}")
        words = re.findall(r"[FB]\d+(?:\.\d+)?", row)
        plan = training_plan(stage, stages, chunks, micro_batches)
        assert words == [str(action) if chunks > 1 else str(action)[:-2] for action in plan]


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(1, 1, 1), (3, 1, 4), (4, 2, 8)])
def test_svg_is_whole_and_has_every_action_where_it_ran(stages, chunks, micro_batches):
    timeline = timeline_of(stages, chunks, micro_batches)
    text = as_svg(timeline, "a title")
    root = ElementTree.fromstring(text)
    assert text.count("http") == 1  # the namespace; nothing is fetched
    drawn = root.findall(f"{SVG}g")
    spans = [span for spans in timeline.stages for span in spans]
    assert len(drawn) == len(spans) == 2 * stages * chunks * micro_batches
    scale = float(drawn[0].find(f"{SVG}rect").get("width"))  # of a forward, the time unit
    for group, span in zip(drawn, spans, strict=True):
        box, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text").text
        assert float(box.get("x")) == pytest.approx(64 + span.start * scale, abs=0.1)
        assert float(box.get("width")) == pytest.approx((span.end - span.start) * scale, abs=0.1)
        assert float(box.get("x")) + float(box.get("width")) <= float(root.get("width"))
        assert label == (str(span.action) if chunks > 1 else str(span.action)[:-2])
    colors = {group.find(f"{SVG}rect").get("fill") for group in drawn}
    assert len(colors) == 2 * chunks
    assert "a title" in text
