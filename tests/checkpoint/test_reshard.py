"""A checkpoint of any layout loads on every other, optimizer included, and the run goes on.

The truth is one rank that trains all steps and never stops. Each layout trains the first steps and
saves; each layout loads what each has saved and trains on, in float64: losses, gradient norms and
every weight and moment must be those of the truth but for the order of sums. ``make test`` runs a
few pairs of layouts, ``make test-layouts`` all 64, with the two kinds of models in turn. Results
are kept, since ranks start slowly: a layout runs twice, once to save and once to load everything.
"""

import functools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from lib.train.comparison import KEY_BIAS
from tests.checkpoint import reshard_layouts as layouts
from tests.checkpoint import reshard_work as work
from tests.checkpoint.reshard_layouts import FAMILIES, LAYOUTS
from tests.distributed import run_on_ranks

TOLERANCE = 1e-9
SECONDS = 900
# The first test of a file waits for all layouts to save.
pytestmark = pytest.mark.timeout(SECONDS)
ITERATION = f"iter_{layouts.BEFORE:07d}"
# Layouts by the one that loads what they saved.
FEW = {"tp2s-dp2": ("tp2s-dp2", "pp4"), "pp4": ("tp2s-dp2",), "one": ("pp4",)}
MANY = {name: tuple(LAYOUTS) for name in LAYOUTS}
# B35: with 3 and 4 copies a rank has empty shards only, two ranks with 4.
NARROW_PAIRS = {f"narrow-dp{data}": ("narrow-dp2", "narrow-dp4") for data in (1, 3, 4)}


def pairs(targets):
    return [(source, target) for target, sources in targets.items() for source in sources]


@functools.cache
def folder():
    kept = tempfile.TemporaryDirectory(prefix="test-reshard-")
    return kept, Path(kept.name)


@functools.cache
def config_of(family):
    place = folder()[1] / family
    place.mkdir()
    return layouts.config_of(place, family)


def text_of(layout, family):
    return layouts.laid_out(config_of(family), layout).to_json()


def place_of(kind, layout, family):
    return folder()[1] / family / kind / layout.replace("/", "-")


def saved_by(layout, family):
    return layouts.Saved(place_of("plain", layout, family), place_of("dropout", layout, family))


def on_layout(layout, function, jobs):
    return run_on_ranks(layouts.processes_of(layout), function, jobs, timeout=SECONDS)


@functools.cache
def truth(family):
    return run_on_ranks(1, work.train_alone, config_of(family).to_json(), timeout=SECONDS)[0]


@functools.cache
def saved_on(layout):
    """Trains and saves; gives how each rank went on with dropout, run by run."""
    families = layouts.families_on(layout)
    jobs = [(text_of(layout, family), saved_by(layout, family)) for family in families]
    return on_layout(layout, work.train_and_save, jobs)


def sources_with(family, target, sources):
    """The sources from which the target loads this model."""
    return [source for source in sources if family == layouts.family_of_pair(source, target)]


@functools.cache
def resumed_on(layout, sources):
    """Of each rank, run by run: its course in the same layout, the ends by other layouts."""
    for source in sources:
        saved_on(source)
    jobs = []
    for family in layouts.families_on(layout):
        own = saved_by(layout, family) if layout in sources else None
        mine = sources_with(family, layout, sources)
        checkpoints = {source: saved_by(source, family).plain for source in mine}
        again = place_of("again", layout, family)
        jobs.append((text_of(layout, family), own, checkpoints, again))
    return on_layout(layout, work.resume_all, jobs)


def stored(checkpoint):
    """All tensors of a checkpoint but the random streams, read by torch on this process."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if not name.startswith("random.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


@functools.cache
def stored_by(layout, family):
    saved_on(layout)
    return stored(saved_by(layout, family).plain / ITERATION)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found, expected):
    """Each tensor to 1e-9 of its own size; key biases have rounding noise for a gradient."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.endswith(KEY_BIAS):
            distance = (found[name] - value).norm().item()
            assert distance <= TOLERANCE * value.norm().item(), (name, distance)


def check_pair(source, target, targets):
    sources, family = targets[target], layouts.family_of_pair(source, target)
    number = layouts.families_on(target).index(family)
    _, ends = resumed_on(target, sources)[0][number]
    end, expected = ends[source], truth(family)
    assert end.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert end.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert_close(end.tensors, expected.tensors)
    place = str(sources_with(family, target, sources).index(source))
    again = place_of("again", target, family) / place / ITERATION
    assert_same_bits(stored(again), stored_by(source, family))


def check_same_layout(layout, targets):
    """To the last bit the run that did not stop; and every rank has its own streams (B54)."""
    before, found = saved_on(layout), resumed_on(layout, targets[layout])
    assert [[course for course, _ in runs] for runs in found] == before
    for courses in zip(*before, strict=True):
        default = {course.place[:2]: course.streams["cpu"] for course in courses}
        assert len(set(default.values())) == len(default)  # one for each stage and copy
        assert all(course.streams["cpu"] == default[course.place[:2]] for course in courses)
        shards = [course.streams["shard"] for course in courses if len(course.streams) > 1]
        assert len(set(shards)) == len(shards)
        assert len(shards) == (len(courses) if LAYOUTS[layout].tensor > 1 else 0)


def test_the_layouts_hold_every_kind():
    assert layouts.kinds() == {
        "tensor": {1, 2, 4},
        "pipeline": {1, 2, 4},
        "data": {1, 2, 3, 4},
        "chunks": {1, 2},
        "sharding": {"optimizer", "gradients", "parameters"},
        "sequence": {False, True},
        "split by hand": {False, True},
        "replicas": {False, True},
        "processes": {1, 3, 4, 8},
    }
    assert len(LAYOUTS) == 8
    models = [config_of(family).model for family in FAMILIES]
    assert {model.tie_embeddings for model in models} == {False, True}
    assert any(model.num_query_groups < 4 for model in models)  # shared by tensor ranks
    assert config_of("gpt2").derived.padded_vocab_size > layouts.VOCABULARY


@pytest.mark.parametrize(("source", "target"), pairs(FEW))
def test_a_checkpoint_loads_on_another_layout(source, target):
    check_pair(source, target, FEW)


def test_the_same_layout_goes_on_as_if_it_had_not_stopped():
    check_same_layout("tp2s-dp2", FEW)


@pytest.mark.parametrize(("source", "target"), pairs(NARROW_PAIRS))
def test_ranks_without_a_single_row_save_and_load(source, target):
    shapes = {tuple(value.shape) for value in truth("narrow").tensors.values()}
    assert max(shape[0] for shape in shapes) == 2
    check_pair(source, target, NARROW_PAIRS)


@pytest.mark.layouts
@pytest.mark.parametrize(("source", "target"), pairs(MANY))
def test_every_checkpoint_loads_on_every_layout(source, target):
    check_pair(source, target, MANY)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_as_if_it_had_not_stopped(layout):
    check_same_layout(layout, MANY)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n == "pp4" else pytest.mark.layouts) for n in LAYOUTS]
)
def test_what_is_saved_depends_on_no_layout(layout):
    """The same names, shapes and numbers; each number written once, by one of the ranks."""
    for family in FAMILIES:
        found = stored_by(layout, family)
        assert_close(found, stored_by("tp2s-dp2", family))
        checkpoint = saved_by(layout, family).plain / ITERATION
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        written = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
        assert sum(place.length for place in metadata.storage_data.values()) == written
        for name, value in found.items():
            chunks = metadata.state_dict_metadata[name].chunks
            assert sum(chunk.sizes.numel() for chunk in chunks) == value.numel(), name
