"""The documents of a step, read back from the raw corpus, are what the ranks trained on."""

import itertools

import numpy as np
import pytest
import torch

from lib.checkpoint.run_data import open_samples, training_samples
from lib.config.batch_schedule import BatchSchedule
from lib.data.tokens_manifest import TokensManifest
from lib.errors import UserError
from lib.model.loss import SampleRules, micro_batch
from lib.parallel.groups import Group
from lib.train.batches import BatchShape, Reading, TrainingBatches
from lib.train.loop import Hooks, train
from lib.train.step import Progress
from lib.workflow.sample_view import SampleView, token_text
from lib.workflow.step_documents import RankLayout, RunDocuments, Step
from tests.distributed import run_on_ranks
from tests.train.tiny_run import build_tiny
from tests.workflow.text_run import CODE, PAIR, PAIR_TEXTS, PROSE, write_texts

CPU = torch.device("cpu")
BEGINNINGS = [0, 4, 8, 16, 24, 32, 40, 48]  # of the eight steps, in samples
RULES = {"eod_in_loss": False, "positions": "document", "attention": "document"}
# tensor, pipeline, data, and the micro batch sizes of both phases
LAYOUTS = [
    (1, 1, 1, (4, 8)),
    (1, 1, 1, (1, 2)),
    (1, 1, 2, (2, 1)),
    (2, 1, 2, (1, 4)),
    (1, 2, 2, (2, 2)),
    (2, 2, 1, (4, 1)),
    (1, 1, 4, (1, 2)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def lookup(run):
    """Documents by a configuration that knows nothing of the layout."""
    return RunDocuments(run.config(**RULES), run.raw, run.folder / "data/tokenizer")


def retokenised(run, sample):
    """A sample from the texts alone: tokens, which end a document, and each one's piece."""
    tokens, ends, numbers, places = [], [], [], []
    for number, (piece, origin) in enumerate((each.piece, each.origin) for each in sample.pieces):
        assert piece.place == len(tokens)
        if sample.corpus == PAIR:
            assert origin.source is None
            assert origin.text == PAIR_TEXTS[piece.document]
        else:
            assert origin.source == "s"
            assert origin.text == run.texts[sample.corpus][origin.line - 1]
            assert origin.raw_document == origin.line - 1
        document = run.ids(origin.text)
        assert piece.length == len(document)
        part = document[piece.first : piece.last]
        tokens += part
        ends += [place == piece.length - 1 for place in range(piece.first, piece.last)]
        numbers += [number] * len(part)
        places += range(len(part))
    return np.array(tokens), np.array(ends), np.array(numbers), np.array(places)


def check_rows(run, samples, rows):
    """Rows of a rank, [seq_length + 1] tokens each, against the texts."""
    for sample, row in zip(samples, rows, strict=True):
        tokens, _, _, _ = retokenised(run, sample)
        np.testing.assert_array_equal(tokens, row)


def check_batch(run, samples, batch):
    windows = torch.cat([batch.tokens_SB, batch.labels_SB[-1:]]).T.numpy()
    check_rows(run, samples, windows)
    for row, sample in enumerate(samples):
        _, ends, numbers, places = retokenised(run, sample)
        np.testing.assert_array_equal(batch.weights_SB[:, row].numpy(), ~ends[1:])
        np.testing.assert_array_equal(batch.layout.documents.number_SB[:, row], numbers[:-1])
        np.testing.assert_array_equal(batch.layout.positions_SB[:, row], places[:-1])


@pytest.mark.parametrize(("tensor", "pipeline", "data", "sizes"), LAYOUTS)
def test_the_documents_of_a_step_are_what_the_ranks_read(
    run, lookup, tensor, pipeline, data, sizes
):
    """In every layout, over a ramp-up and a change of lengths and shares, micro batch by batch."""
    config = run.config(tensor, pipeline, data, sizes, **RULES)
    schedule, seen, starts = BatchSchedule.of(config.training), set(), []
    samples = training_samples(config)
    grid = itertools.product(range(pipeline), range(data), range(tensor))
    for rank, (_, dp_rank, _) in enumerate(grid):
        shape = BatchShape(config.data.phases, schedule, Group(dp_rank, data))
        batches = TrainingBatches(samples, shape, Reading(SampleRules.of(config.data), CPU))
        for number, consumed in enumerate(BEGINNINGS, start=1):
            step = Step.of(config, number)
            positions = RankLayout.of(config, step, None).positions(step, rank)
            taken = batches.take(consumed)
            assert len(taken) == len(positions)
            for row, batch in zip(positions.tolist(), taken, strict=True):
                found = list(lookup.behind(step, row))
                check_batch(run, found, batch)
                seen |= {each.corpus for each in found}
                starts += [each.start for each in found if each.corpus == CODE]
        batches.close()
    assert seen == {CODE, PROSE, PAIR}
    border = TokensManifest.load(run.manifests[CODE]).parts[0].tokens
    assert min(starts) < border < max(starts), "samples are read from both parts of the corpus"


def test_all_ranks_together_read_the_samples_of_the_step(run):
    for tensor, pipeline, data, sizes in LAYOUTS:
        config = run.config(tensor, pipeline, data, sizes)
        for number, (first, last) in enumerate(itertools.pairwise([*BEGINNINGS, 56]), start=1):
            step = Step.of(config, number)
            layout = RankLayout.of(config, step, None)
            one_of_each = {layout.copy_of(r): r for r in range(tensor * pipeline * data)}
            read = [layout.positions(step, rank).ravel() for rank in one_of_each.values()]
            assert sorted(np.concatenate(read)) == list(range(first, last))
            assert step.positions().tolist() == list(range(first, last))


def train_and_record(config_text):
    """Trains on this rank; gives of each step the rows that the loop took, [samples, S + 1]."""
    parts = build_tiny(config_text)
    take, taken = parts.batches.take, []

    def recording(consumed_samples):
        batches = take(consumed_samples)
        rows = [torch.cat([each.tokens_SB, each.labels_SB[-1:]]).T for each in batches]
        taken.append(torch.cat(rows).clone())
        return batches

    parts.batches.take = recording
    nothing = [lambda _: None] * 4
    train(parts, Progress(), Hooks(*nothing, stop_requested=lambda: False))
    parts.close()
    return taken


def test_the_documents_of_a_step_are_what_a_real_run_trained_on(run, lookup):
    config = run.config(1, 1, 2, (2, 1), **RULES)
    ranks = run_on_ranks(2, train_and_record, config.to_json())
    for rank, steps in enumerate(ranks):
        assert len(steps) == len(BEGINNINGS)
        for number, rows in enumerate(steps, start=1):
            step = Step.of(config, number)
            positions = RankLayout.of(config, step, None).positions(step, rank).ravel()
            check_rows(run, lookup.behind(step, positions.tolist()), rows.numpy())


def test_a_layout_can_be_given(run):
    config = run.config()
    step = Step.of(config, 5)
    with pytest.raises(UserError, match=r"--layout is missing: parallel\.data is null"):
        RankLayout.of(config, step, None)
    layout = RankLayout.of(config, step, "data=2, micro_batch_size=4,tensor=2")
    assert layout == RankLayout(tensor=2, pipeline=1, data=2, micro_batch_size=4)
    assert [layout.copy_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    for wrong in ("data", "data=0", "data=x", "data=-1", "chunks=2", "data=2,,tensor=2", "=2"):
        with pytest.raises(UserError, match=r"--layout .* is none of tensor, pipeline"):
            RankLayout.of(config, step, wrong)
    with pytest.raises(UserError, match="8 samples do not divide over data = 3 copies"):
        RankLayout.of(config, step, "data=3")
    for rank in (-1, 4):
        with pytest.raises(UserError, match=f"--rank {rank}: the layout has the processes 0 to 3"):
            layout.positions(step, rank)


def test_steps_that_the_run_does_not_have_are_refused(run):
    for number in (-1, 0, 9):
        with pytest.raises(UserError, match=f"step {number}: the run has the steps 1 to 8"):
            Step.of(run.config(), number)


@pytest.mark.parametrize("positions", ["window", "document"])
@pytest.mark.parametrize("attention", ["window", "document"])
@pytest.mark.parametrize("eod_in_loss", [True, False])
def test_a_view_is_what_the_model_is_given(run, positions, attention, eod_in_loss):
    """Against the micro batch, which is made by other code."""
    rules = {"positions": positions, "attention": attention, "eod_in_loss": eod_in_loss}
    config = run.config(**rules)
    for name in (CODE, PAIR):
        windows = open_samples(config, name, "train", 16)
        for sample in range(0, windows.num_samples, 5):
            view = SampleView.of(windows, sample, config.data)
            given = micro_batch(
                windows.window(sample)[None],
                np.array([True]),
                SampleRules.of(config.data),
                [windows.starts(sample)],
            )
            np.testing.assert_array_equal(view.tokens, given.tokens_SB[:, 0])
            np.testing.assert_array_equal(view.labels, given.labels_SB[:, 0])
            np.testing.assert_array_equal(view.counts, given.weights_SB[:, 0])
            layout = given.layout
            place = np.arange(16)
            expected = place if positions == "window" else layout.positions_SB[:, 0]
            np.testing.assert_array_equal(view.positions, expected)
            if attention == "window":
                assert not view.sees_from.any()
            else:
                allowed = layout.documents.allowed()[0, 0].numpy()
                sees = (place >= view.sees_from[:, None]) & (place <= place[:, None])
                np.testing.assert_array_equal(sees, allowed)


def test_tokens_are_told_by_their_text(run):
    """The tokens of a text, put together, are the text; half a character is told by its letters."""
    text = "def add(first)\n\n 12345"
    ids = run.tokenizer.encode(text)
    assert "".join(token_text(run.tokenizer, token) for token in ids) == text
    assert token_text(run.tokenizer, run.tokenizer.eod_id) == "<|endoftext|>"
    (first, *_) = run.tokenizer.encode("\u20ac")
    assert token_text(run.tokenizer, first) == "\u00e2"
