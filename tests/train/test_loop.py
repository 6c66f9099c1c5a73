"""The training loop against a loop written by hand, and against itself under other layouts."""

import numpy as np
import pytest
import torch

from lib.data.order import SampleOrder
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.initialization import initialize
from lib.parallel.groups import ParallelGroups
from tests.data.tiny_corpus import write_corpus
from tests.distributed import run_on_ranks
from tests.train.tiny_run import VOCABULARY, run_tiny, tiny_config, write_tokens


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def train_tiny(manifest, ranks=1, spoil_at=None, **changes):
    config = tiny_config(manifest, **changes)
    return run_on_ranks(ranks, run_tiny, config.to_json(), spoil_at)[0]


def column(result, name):
    return [row[name] for row in result["rows"]]


def by_hand(manifest, left_out):
    """The same run with nothing of lib but the model: windows, mean loss, clipping and AdamW.

    ``left_out``: a label that does not count.
    """
    config = tiny_config(manifest)
    training, vocab_size = config.training, config.data.vocab_size
    model = GPTModel(
        config.model,
        vocab_size=vocab_size,
        padded_vocab_size=config.derived.padded_vocab_size,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("reference")),
        part=whole_model(config.model),
    )
    initialize(model, config.model, vocab_size=vocab_size, seed=training.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    corpus = TokenizedCorpus.open(manifest)
    tokens = torch.tensor(corpus.read(0, corpus.document_start(32)))
    count = (len(tokens) - 1) // 16
    order = SampleOrder.of_one(count, training.seed, "tiny")
    # Warm-up over 2 steps; then a cosine from 1e-2 to 0 that ends at step 6.
    rates = [1e-2 / 3, 2e-2 / 3, *(5e-3 * (1 + np.cos(np.pi * step / 4)) for step in range(4))]
    losses, norms = [], []
    for step, rate in enumerate(rates):
        numbers = order.samples_at(np.arange(8 * step, 8 * step + 8)).sample
        windows = torch.stack([tokens[16 * k : 16 * k + 17] for k in numbers.tolist()])
        logits = model(windows[:, :-1].T)[..., :vocab_size]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, vocab_size), windows[:, 1:].T.reshape(-1), ignore_index=left_out
        )
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, rates


@pytest.mark.parametrize("eod_in_loss", [True, False])
def test_equals_a_loop_written_by_hand(manifest, eod_in_loss):
    losses, norms, rates = by_hand(manifest, left_out=-1 if eod_in_loss else 0)
    result = train_tiny(manifest, data__eod_in_loss=eod_in_loss)
    assert column(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert column(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert column(result, "learning_rate") == pytest.approx(rates, rel=1e-12)
    assert column(result, "consumed_samples") == [8, 16, 24, 32, 40, 48]
    assert column(result, "consumed_tokens") == [128, 256, 384, 512, 640, 768]
    assert result["saves"] == [6]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"training__micro_batch_size": 8}),
        (1, {"training__micro_batch_size": 1}),
        (2, {}),
        (2, {"training__micro_batch_size": 1}),
        (4, {}),
    ],
)
def test_any_split_of_the_batch_gives_the_same_run(manifest, ranks, changes):
    expected = train_tiny(manifest, training__eval_interval=3)
    result = train_tiny(manifest, ranks, training__eval_interval=3, **changes)
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), rel=1e-5)
    assert column(result, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5)
    for name, row in zip(expected["validations"], result["validations"], strict=True):
        assert row == pytest.approx(name, rel=1e-5)


def test_bf16_follows_fp32(manifest):
    expected = train_tiny(manifest)
    result = train_tiny(manifest, precision__compute="bf16")
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), rel=1e-2)
    assert column(result, "loss") != column(expected, "loss")
    assert all(weight.dtype == torch.float32 for weight in result["weights"].values())


def test_validation_does_not_disturb_training(manifest):
    dropout = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
    runs = [train_tiny(manifest, training__eval_interval=n, **dropout) for n in (0, 1, 3)]
    assert column(runs[1], "loss") == column(runs[0], "loss")
    assert column(runs[2], "loss") == column(runs[0], "loss")
    assert [row["step"] for row in runs[1]["validations"]] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in runs[2]["validations"]] == [3, 6]
    assert runs[1]["validations"][2] == runs[2]["validations"][0]
    assert all(run["training_mode"] for run in runs)
    assert not runs[0]["validations"]


def test_validation_counts_what_it_was_asked_for(manifest):
    result = train_tiny(manifest, training__eval_interval=6)
    (row,) = result["validations"]
    valid = tiny_config(manifest).data.corpora["tiny"].splits["valid"].samples
    assert row["samples"] == min(valid, 2 * 8)
    assert row["tokens"] == 16 * row["samples"]


def test_each_validation_set_has_its_loss_and_all_together_have_one_per_token(manifest, tmp_path):
    """B69: sets of unlike lengths, on one rank and told through a pipeline."""
    manifests = {"tiny": manifest, "apart": write_tokens(tmp_path / "apart", seed=3)}
    changes = {
        "training__eval_interval": 6,
        "training__eval_iters": 100,
        "data__blend": {"tiny": 1},
    }
    whole, *alone = (
        train_tiny(manifests, **changes, data__validation=names)["validations"][0]
        for names in (["tiny", "apart"], ["tiny"], ["apart"])
    )
    tokens = [row["tokens"] for row in alone]
    assert whole["tokens"] == sum(tokens)
    assert tokens[1] > 5 * tokens[0]  # all documents of the one, a tenth of the other
    losses = [row["loss"] for row in alone]
    assert [whole["loss/tiny"], whole["loss/apart"]] == losses
    assert whole["loss"] == pytest.approx(np.average(losses, weights=tokens), rel=1e-12)
    changes |= {"data__validation": ["tiny", "apart"], "parallel__pipeline": 2}
    (other,) = train_tiny(manifests, 2, **changes)["validations"]
    assert other == pytest.approx(whole, rel=1e-5)


def test_validation_measures_with_the_loss_of_training(manifest):
    """A run whose one batch is the whole training split, and the same documents validated."""
    first = tiny_config(manifest, training__split="50,50,0").data.corpora["tiny"].splits
    whole_batch = {
        "training__split": "50,50,0",
        "training__train_iters": 1,
        "schedule__warmup_iters": 0,
        "schedule__decay_iters": 1,
        "training__eval_interval": 1,
        "optimizer__lr": 1e-30,
    }
    size = first["train"].samples
    trained = train_tiny(
        manifest,
        **whole_batch,
        training__global_batch_size=size,
        training__micro_batch_size=size,
        training__eval_iters=first["valid"].samples // size + 1,
    )
    corpus, valid = TokenizedCorpus.open(manifest), first["valid"].samples
    start = corpus.document_start(20)
    halves = [corpus.read(start, corpus.num_tokens), corpus.read(0, start)]
    copy = write_corpus(manifest.parent / "swapped", halves, vocab_size=VOCABULARY)
    swapped = train_tiny(
        copy, **whole_batch, training__global_batch_size=valid, training__micro_batch_size=valid
    )
    assert trained["validations"][0]["samples"] == valid
    assert trained["validations"][0]["loss"] == pytest.approx(swapped["rows"][0]["loss"], rel=1e-6)


def test_steps_without_finite_numbers_change_nothing_and_end_the_run(manifest):
    changes = {"training__train_iters": 20, "schedule__decay_iters": 20}
    with pytest.raises(
        Exception, match=r"10 steps in a row up to step 13 gave no\s+finite numbers"
    ):
        train_tiny(manifest, spoil_at=3, **changes)


def test_a_bad_step_is_skipped_and_counted(manifest):
    good = train_tiny(manifest, training__train_iters=3)
    result = train_tiny(manifest, spoil_at=3)
    assert column(result, "skipped") == [0, 0, 0, 1, 1, 1]
    assert column(result, "nan") == [0, 0, 0, 1, 1, 1]
    assert result["skipped"] == 3
    for name, weight in good["weights"].items():
        if name != "final_layernorm.weight":
            assert torch.equal(result["weights"][name], weight), name
