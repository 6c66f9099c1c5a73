"""Held-out loss against a plain computation over the same tokens."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lib.data.samples import SampleWindows
from lib.data.splits import whole_split
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.evaluate.perplexity import Measuring, entropy, measure_loss
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.initialization import initialize
from lib.model.loss import SampleRules
from lib.parallel.groups import ParallelGroups
from tests.data.tiny_corpus import write_corpus
from tests.train.tiny_run import tiny_config, write_tokens

SEQ_LENGTH = 16


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def model(manifest):
    config = tiny_config(manifest)
    built = GPTModel(
        config.model,
        vocab_size=300,
        padded_vocab_size=384,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("auto")),
        part=whole_model(config.model),
    )
    initialize(built, config.model, vocab_size=300, seed=1)
    return built.eval()


def windows_of(manifest):
    corpus = TokenizedCorpus.open(manifest)
    return SampleWindows(corpus, whole_split(corpus, SEQ_LENGTH), SEQ_LENGTH)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_equals_a_plain_computation(manifest, model, batch_size):
    windows = windows_of(manifest)
    count = windows.num_samples
    assert count > 100
    lengths = np.arange(300, dtype=np.int32) % 5
    finished: list[int] = []
    found = measure_loss(
        model,
        windows,
        lengths,
        Measuring(batch_size, count, SampleRules()),
        finished.append,
    )
    corpus = TokenizedCorpus.open(manifest)
    tokens = torch.tensor(corpus.read(0, corpus.num_tokens))
    inputs = tokens[: count * SEQ_LENGTH].reshape(count, SEQ_LENGTH)
    labels = tokens[1 : count * SEQ_LENGTH + 1].reshape(count, SEQ_LENGTH)
    with torch.no_grad():
        logits = model(inputs.T)[..., :300].double()
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 300), labels.T.reshape(-1), reduction="none"
    ).reshape(SEQ_LENGTH, count)
    assert (sum(finished), found.tokens) == (count, labels.numel())
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found.loss_sums / found.counts == pytest.approx(losses.mean(1).numpy(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
    assert found.text_bytes == (labels % 5).sum().item()
    bits = losses.sum().item() / math.log(2) / found.text_bytes
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-6)
    shares = torch.bincount(labels.reshape(-1)).double() / labels.numel()
    shares = shares[shares > 0]
    assert found.unigram_entropy == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-12)


def test_fewer_samples_measure_the_first_ones(manifest, model):
    windows = windows_of(manifest)
    lengths = np.ones(300, dtype=np.int32)

    def measure(count):
        return measure_loss(
            model, windows, lengths, Measuring(4, count, SampleRules()), lambda _: None
        )

    one, two = measure(1), measure(2)
    assert (one.tokens, two.tokens, two.text_bytes) == (SEQ_LENGTH, 2 * SEQ_LENGTH, 2 * SEQ_LENGTH)
    with torch.no_grad():
        window = torch.tensor(windows.window(1))
        second = model(window[:-1, None], window[1:, None]).mean().item()
    assert two.loss == pytest.approx((one.loss + second) / 2, rel=1e-6)


def test_the_rules_of_training_hold_for_what_is_measured(manifest, model):
    """Against each piece of a document run alone, and ends of documents left out by hand."""
    windows = windows_of(manifest)
    rules = SampleRules(eod_id=0, reset_positions=True, within_documents=True)
    lengths = np.ones(300, dtype=np.int32)
    found = measure_loss(model, windows, lengths, Measuring(3, 20, rules), lambda _: None)
    losses = []
    for sample in range(20):
        edges = [0, *windows.starts(sample), SEQ_LENGTH]
        window = torch.tensor(windows.window(sample))
        for first, last in pairwise(edge for edge in edges if edge <= SEQ_LENGTH):
            inputs, labels = window[first:last], window[first + 1 : last + 1]
            if first < last:
                with torch.no_grad():
                    piece = model(inputs[:, None], labels[:, None])[:, 0]
                losses += piece[labels != 0].tolist()
    assert 250 < found.tokens == len(losses) < 20 * SEQ_LENGTH
    assert found.label_counts[0] == 0
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_entropy_of_known_distributions():
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 9])) == 0
    assert entropy(np.array([1, 3])) == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    )


def test_a_model_that_knows_the_text_has_no_loss(tmp_path):
    """Cyclic tokens and logits that always name the next one: loss 0, perplexity 1."""
    manifest = write_corpus(tmp_path, [np.arange(400) % 10], vocab_size=10)

    class Knowing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(()))

        def forward(self, tokens_SB, labels_SB, _layout):
            return (labels_SB != (tokens_SB + 1) % 10).float()

    found = measure_loss(
        Knowing(),
        windows_of(manifest),
        np.full(10, 2, dtype=np.int32),
        Measuring(3, 24, SampleRules()),
        lambda _: None,
    )
    assert (found.loss, found.perplexity, found.bits_per_byte) == (0, 1, 0)
    assert found.unigram_entropy == pytest.approx(math.log(10), rel=1e-3)
