"""What the ranks of a layout are given to compute, against the corpora read by hand.

Two corpora in unlike shares, then a phase with longer samples of one of them; ends of documents
count for nothing, positions and attention stay within documents.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lib.data.order import SampleOrder
from lib.data.tokenized_corpus import TokenizedCorpus
from tests.distributed import run_on_ranks
from tests.train.tiny_run import build_tiny, tiny_config, write_tokens

BEGINNINGS = (0, 8, 16, 24)
LENGTHS = {0: 16, 8: 16, 16: 32, 24: 32}
DATA = {
    "data__blend": {"one": 1, "two": 2},
    "data__phases": [
        {"from_samples": 16, "seq_length": 32, "micro_batch_size": 1, "blend": {"two": 1}}
    ],
    "data__eod_in_loss": False,
    "data__positions": "document",
    "data__attention": "document",
    "model__num_layers": 4,
}
LAYOUTS = [
    {"parallel__data": 4},
    {"parallel__tensor": 2, "parallel__sequence": True, "parallel__data": 2},
    {"parallel__pipeline": 2, "parallel__data": 2, "parallel__virtual_stages": 2},
    {"parallel__pipeline": 4},
]


def loaded(config_texts):
    """This rank's place, and its micro batches of each step, for each layout."""
    found = []
    for text in config_texts:
        parts = build_tiny(text, num_workers=2)
        groups = parts.groups
        steps = {consumed: parts.batches.take(consumed) for consumed in BEGINNINGS}
        parts.close()
        found.append(((groups.pp.rank, groups.dp.rank, groups.tp.rank), groups.pp.size, steps))
    return found


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return {name: write_tokens(folder / name, seed) for seed, name in enumerate(("one", "two"))}


def by_hand(config, manifests, consumed):
    """The windows of a step in the order of their positions, and where documents begin in them."""
    order = SampleOrder.of_phases(config.data.phases, config.training.seed)
    length, found = LENGTHS[consumed], []
    for position in range(consumed, consumed + 8):
        corpus, sample = (int(each[0]) for each in order.samples_at(np.array([position])))
        tokens = TokenizedCorpus.open(manifests[order.names[corpus]])
        first = sample * length  # the training split begins with the corpus
        ends = [tokens.document_start(number) for number in range(1, tokens.num_documents)]
        window = tokens.read(first, first + length + 1)
        found.append((window, [end - first for end in ends if first < end < first + length]))
    return found


def check_batch(batch, windows, stage, stages):
    length = batch.tokens_SB.shape[0]
    for column, (window, starts) in enumerate(windows):
        inputs, labels = torch.tensor(window[:-1]), torch.tensor(window[1:])
        if stage in (0, stages - 1):
            assert torch.equal(batch.tokens_SB[:, column], inputs)
            assert torch.equal(batch.labels_SB[:, column], labels)
            assert torch.equal(batch.weights_SB[:, column], (labels != 0).float())
        else:
            assert not batch.tokens_SB.any()
        edges = [0, *starts, length]
        positions = torch.cat([torch.arange(last - first) for first, last in pairwise(edges)])
        numbers = torch.cat(
            [torch.full((last - first,), n) for n, (first, last) in enumerate(pairwise(edges))]
        )
        assert torch.equal(batch.layout.positions_SB[:, column], positions)
        assert torch.equal(batch.layout.documents.number_SB[:, column], numbers.int())


def test_every_rank_gets_its_part_of_the_step_in_every_layout(manifests):
    """B19, B20, B69: by place in the corpora; the ranks of one copy get the same."""
    configs = [tiny_config(manifests, **DATA, **layout) for layout in LAYOUTS]
    ranks = run_on_ranks(4, loaded, [config.to_json() for config in configs], timeout=120)
    expected = {consumed: by_hand(configs[0], manifests, consumed) for consumed in BEGINNINGS}
    assert any(starts for step in expected.values() for _, starts in step)
    for layouts in zip(*ranks, strict=True):
        copies = 1 + max(dp_rank for (_, dp_rank, _), _, _ in layouts)
        for (stage, dp_rank, _), stages, steps in layouts:
            for consumed, batches in steps.items():
                size = batches[0].tokens_SB.shape[1]
                assert size == (2 if consumed < 16 else 1)
                assert len(batches) == 8 // (size * copies)
                for number, batch in enumerate(batches):
                    first = (number * copies + dp_rank) * size
                    check_batch(batch, expected[consumed][first : first + size], stage, stages)
