"""Evaluation of a published model: it is the trained one, on its own tokens, and its texts."""

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lib.checkpoint.published import publish_model
from lib.config.operation import EvaluateConfig
from lib.config.run_config import RunConfig
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.pair_description import PairTokenizer, describe_pair
from lib.data.sentencepiece_model import to_tokenizer
from lib.data.splits import describe_splits
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, token_byte_lengths
from lib.data.tokens_manifest import MANIFEST_FILE, TOKENS_PREFIX, TokensManifest
from lib.errors import UserError
from lib.evaluate.evaluation import (
    Text,
    added_up,
    decode_after,
    generate_texts,
    held_out_losses,
    load_model,
    loss_by_position_csv,
    metrics,
    open_sets,
    samples_markdown,
    syntax_share,
)
from lib.evaluate.generate import Sampling, continue_prompt
from lib.evaluate.perplexity import HeldOutLoss
from lib.layers.attention import attention_backend
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.initialization import initialize
from lib.parallel.groups import ParallelGroups
from tests.data.tiny_tokenizer import EOD, TRAINING_TEXT, save_tiny, sentencepiece_model, train
from tests.stored import values_of
from tests.train.tiny_run import VOCABULARY, tiny_config

PROJECT = Path(__file__).parents[2]
VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def ignore(_amount):
    return None


@dataclass(frozen=True)
class Published:
    """A project's folder with tokens and a model, and the model as it was trained."""

    folder: Path
    config: RunConfig
    trained: GPTModel


def write_texts(folder: Path, tokenizer: TextTokenizer, texts: list[str]) -> Path:
    """A corpus of texts; gives the path of its manifest."""
    folder.mkdir(parents=True)
    with IndexedDatasetWriter(folder / TOKENS_PREFIX, np.uint16) as writer:
        for text in texts:
            writer.add_document(np.array([*tokenizer.encode(text), tokenizer.eod_id]))
    made_by = PairTokenizer(tokenizer.fingerprint, tokenizer.eod_id, token_byte_lengths(tokenizer))
    pair = IndexedDataset(folder / TOKENS_PREFIX)
    describe_pair(pair, made_by, append_eod=True).write(folder / MANIFEST_FILE)
    return folder / MANIFEST_FILE


def publish(folder: Path, **changes: object) -> Published:
    """Writes ``folder/data`` and ``folder/model``: a model with random weights.

    Of the two corpora one is trained on; the other, which is half as long, can be measured.
    """
    tokenizer = save_tiny(folder / "data" / "tokenizer", VOCABULARY)
    assert tokenizer.vocab_size == VOCABULARY
    texts = [TRAINING_TEXT[number : 3 * number + 40] for number in range(40)]
    manifests = {
        name: write_texts(folder / "data" / "tokens" / name, tokenizer, texts[:count])
        for name, count in (("tiny", 40), ("apart", 20))
    }
    config = tiny_config(manifests, **{"data__blend": {"tiny": 1}, **changes})
    trained = GPTModel(
        config.model,
        vocab_size=VOCABULARY,
        padded_vocab_size=config.derived.padded_vocab_size,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("auto")),
        part=whole_model(config.model),
    )
    initialize(trained, config.model, vocab_size=VOCABULARY, seed=1)
    tensors = {
        name: value[:VOCABULARY] if name in VOCABULARY_TABLES else value
        for name, value in values_of(trained).items()
    }
    log = folder / "log"
    log.write_text("")
    publish_model(folder / "model", tensors, config, folder / "data" / "tokenizer", {}, log)
    return Published(folder, config, trained.eval())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def evaluated(published):
    return load_model(published.folder / "model")


@pytest.mark.parametrize(
    "changes",
    [{}, {"model__tie_embeddings": False, "precision__compute": "bf16"}],
    ids=["tied", "untied-bf16"],
)
def test_the_model_that_is_read_is_the_one_that_was_trained(tmp_path, changes):
    made = publish(tmp_path, **changes)
    read = load_model(tmp_path / "model")
    assert made.config.derived.padded_vocab_size == 384 > VOCABULARY
    assert read.config == made.config
    assert not read.model.training
    weight = next(read.model.parameters())
    assert weight.dtype == COMPUTE_DTYPES[made.config.precision.compute]
    made.trained.to(weight.device, weight.dtype)
    tokens = torch.arange(32, device=weight.device).reshape(16, 2) * 9
    with torch.no_grad():
        assert torch.equal(read.model(tokens), made.trained(tokens))
        assert torch.equal(read.model(tokens, tokens), made.trained(tokens, tokens))


def test_each_set_is_the_split_that_was_asked_for(published, evaluated):
    corpus = TokenizedCorpus.open(published.folder / "data/tokens/tiny/manifest.json")
    starts = {}
    for split in ("valid", "test"):
        (found,) = open_sets(evaluated, EvaluateConfig(split=split))
        facts = describe_splits(corpus, "80,10,10", 16)[split]
        assert (found.name, found.num_samples) == ("tiny", facts.samples)
        assert found.num_samples == found.windows.num_samples > 2
        starts[split] = corpus.document_start(facts.documents[0])
        first = corpus.read(starts[split], starts[split] + 17)
        assert found.windows.window(0).tolist() == first.tolist()
    assert starts["valid"] < starts["test"]


@pytest.mark.parametrize(
    ("max_tokens", "samples"), [(1, 1), (16, 1), (31, 1), (32, 2), (10**9, None)]
)
def test_max_tokens_counts_whole_samples(evaluated, max_tokens, samples):
    (found,) = open_sets(evaluated, EvaluateConfig(max_tokens=max_tokens))
    assert found.num_samples == (samples or found.windows.num_samples)


def test_a_corpus_apart_is_measured_as_a_whole_and_all_sets_per_token(tmp_path):
    """B69: of two sets of unlike lengths the mean is not the mean of means."""
    publish(tmp_path, data__validation=["apart", "tiny"])
    read = load_model(tmp_path / "model")
    apart, tiny = open_sets(read, EvaluateConfig())
    whole = TokenizedCorpus.open(tmp_path / "data/tokens/apart/manifest.json").num_tokens
    assert apart.windows.num_samples == (whole - 1) // 16 > 2 * tiny.windows.num_samples
    losses = held_out_losses(read, [apart, tiny], ignore)
    together = added_up(losses)
    counts = [16 * each.num_samples for each in (apart, tiny)]
    each = [losses[name].loss for name in ("apart", "tiny")]
    assert each[0] != pytest.approx(each[1], rel=1e-3)
    assert [losses[name].tokens for name in ("apart", "tiny")] == counts
    assert together.loss == pytest.approx(np.average(each, weights=counts), rel=1e-12)
    figures = metrics(read, losses, [], EvaluateConfig())
    assert figures["loss"] == together.loss
    assert (figures["loss/apart"], figures["loss/tiny"]) == tuple(each)
    assert figures["bits_per_byte/tiny"] == losses["tiny"].bits_per_byte


def test_a_split_without_a_sample_is_refused(tmp_path):
    publish(tmp_path, training__split="90,10,0")
    read = load_model(tmp_path / "model")
    open_sets(read, EvaluateConfig(split="valid"))
    with pytest.raises(UserError, match=r"evaluate\.split = test: tiny has 0 tokens.*sample of 17"):
        open_sets(read, EvaluateConfig(split="test"))


@pytest.mark.parametrize(
    ("field", "value"), [("tokenizer_fingerprint", "12" * 32), ("vocab_size", 301)]
)
def test_tokens_of_another_model_are_refused(tmp_path, field, value):
    publish(tmp_path)
    read = load_model(tmp_path / "model")
    path = tmp_path / "data/tokens/tiny/manifest.json"
    manifest = TokensManifest.load(path)
    manifest.model_copy(update={field: value}).write(path)
    with pytest.raises(UserError) as caught:
        open_sets(read, EvaluateConfig())
    message = str(caught.value)
    assert str(value) in message
    assert str(getattr(manifest, field)) in message
    assert message.count("instead of") == 1
    assert "dvc repro" in message
    assert "--model" in message


def test_prompts_take_turns(evaluated):
    options = EvaluateConfig(num_samples=5, prompts=("def ", "x = "), max_new_tokens=4)
    counted: list[int] = []
    texts = generate_texts(evaluated, options, counted.append)
    assert [text.prompt for text in texts] == ["def ", "x = ", "def ", "x = ", "def "]
    assert sum(counted) <= 5 * 4
    one = EvaluateConfig(num_samples=1, prompts=("def ", "x = "), max_new_tokens=4)
    assert generate_texts(evaluated, one, ignore) == texts[:1]


def test_without_prompts_texts_begin_as_documents_do(evaluated):
    options = EvaluateConfig(num_samples=3, max_new_tokens=6, temperature=5, top_k=None, seed=2)
    eod_id = evaluated.tokenizer.eod_id
    sampling = Sampling(
        max_new_tokens=6, temperature=5, top_k=None, seed=2, max_context=16, eod_id=eod_id
    )
    expected = continue_prompt(evaluated.model, [eod_id], range(3), sampling, ignore)
    texts = generate_texts(evaluated, options, ignore)
    assert texts == [
        Text("", evaluated.tokenizer.decode(found.tokens), ended=found.ended) for found in expected
    ]
    assert len({text.continuation for text in texts}) == 3
    assert generate_texts(evaluated, EvaluateConfig(num_samples=0), ignore) == []


def metaspace_tokenizer() -> TextTokenizer:
    """One token a character, spaces as the metaspace sign, one of them before every text."""
    characters = "abcdefgh(:)=_\u00e4\u2581"
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return TextTokenizer(backend, describe_tokenizer(backend, "tokenizer_json", "</s>"))


def sentencepiece_tokenizer() -> TextTokenizer:
    """Single letters and bytes, a space before every text, as in Llama's tokenizer."""
    model = sentencepiece_model("abcdefgh(:)=_\u2581", {}, add_dummy_prefix=True)
    backend = to_tokenizer(model, "tiny")
    return TextTokenizer(backend, describe_tokenizer(backend, "sentencepiece", "</s>"))


TOKENIZERS = {
    "metaspace": metaspace_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "byte-level": train(eod=EOD),
}
LETTERS = st.text(alphabet="abc (:)=_\u00e4", max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=LETTERS, continuation=LETTERS)
@example(prompt="def", continuation="abc")
@example(prompt="", continuation="abc")
@example(prompt=" ", continuation=" a")
def test_a_continuation_keeps_its_leading_space(name, prompt, continuation):
    tokenizer = TOKENIZERS[name]
    # The others put a space of their own before a text; Metaspace does not if it has one.
    spaced = prompt.startswith(" ") or continuation.startswith(" ")
    assume(name == "byte-level" or not spaced)
    ids = [tokenizer.eod_id, *tokenizer.encode(prompt)]
    found = decode_after(tokenizer, ids, tokenizer.encode(continuation))
    space = " " if name != "byte-level" and prompt and continuation else ""
    assert found == space + continuation


@pytest.mark.parametrize("name", ["sentencepiece", "byte-level"])
def test_bytes_that_form_no_character_do_not_spoil_the_prompt(name):
    """A run of byte tokens is decoded as a whole: here it reaches back into the prompt."""
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.eod_id, *tokenizer.encode("ab\u00e4")]
    broken = tokenizer.encode("\u00e4")[-1]
    after = tokenizer.encode("c")[-1]
    assert decode_after(tokenizer, ids, [broken, after]) == "\ufffdc"


LOSS = HeldOutLoss(
    loss_sums=np.array([96.0, 32.0]),
    counts=np.array([32, 32]),
    label_counts=np.array([32, 0, 32]),
    text_bytes=200,
)
TEXTS = [
    Text("x = ", "1", ended=True),
    Text("x = ", "1\ny = (", ended=False),
    Text("x = ", "1\ny = (", ended=True),
    Text("", "a b\n", ended=True),
]


def test_metrics_are_flat_figures(evaluated):
    options = EvaluateConfig(split="valid", syntax="python")
    figures = metrics(evaluated, {"tiny": LOSS}, TEXTS, options)
    assert figures == {
        "split": "valid",
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "bits_per_byte": 2.0 * 64 / math.log(2) / 200,
        "unigram_entropy": pytest.approx(math.log(2)),
        "tokens": 64,
        "text_bytes": 200,
        "parameters": evaluated.config.derived.num_parameters,
        "samples": 4,
        "syntax_share": 0.5,
    }
    assert "syntax_share" not in metrics(evaluated, {"tiny": LOSS}, TEXTS, EvaluateConfig())
    assert "syntax_share" not in metrics(evaluated, {"tiny": LOSS}, [], options)
    assert syntax_share(TEXTS[:2]) == 1


def test_pages():
    assert loss_by_position_csv(LOSS) == "position,loss\n1,3.000000\n2,1.000000\n"
    page = samples_markdown(TEXTS, {"syntax_share": 0.5})
    assert page.startswith("# Generated samples\n\n50% of 4 parse as Python.\n\n## 1: after 'x = '")
    assert "## 4: after the beginning of a document\n\n~~~~\na b\n\n~~~~\n" in page
    assert "\n~~~~\nx = 1\ny = (\n~~~~\n" in page
    assert samples_markdown([], {}) == "# Generated samples\n"


def run_stage(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.evaluate", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_stage_writes_its_results_and_refuses_other_tokens(tmp_path):
    publish(tmp_path)
    evaluate = {"num_samples": 3, "prompts": ["def "], "max_new_tokens": 5, "syntax": "python"}
    (tmp_path / "params.yaml").write_text(f"evaluate: {json.dumps(evaluate)}\n")
    done = run_stage(tmp_path)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "results"
    figures = json.loads((results / "evaluate.json").read_text())
    read = load_model(tmp_path / "model")
    sets = open_sets(read, EvaluateConfig())
    expected = added_up(held_out_losses(read, sets, ignore))
    assert figures["tokens"] == sets[0].num_samples * 16
    assert figures["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert figures["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert 0 <= figures["syntax_share"] <= 1
    with (results / "loss_by_position.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["position"]) for row in rows] == list(range(1, 17))
    mean = sum(float(row["loss"]) for row in rows) / 16
    assert mean == pytest.approx(figures["loss"], abs=1e-5)
    assert (results / "samples.md").read_text().count("after 'def '") == 3
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert sorted(before) == ["evaluate.json", "loss_by_position.csv", "samples.md"]

    path = tmp_path / "data/tokens/tiny/manifest.json"
    manifest = TokensManifest.load(path)
    part = manifest.parts[0].model_copy(update={"bin_sha256": "99" * 32})
    manifest.model_copy(update={"parts": (part,)}).write(path)
    refused = run_stage(tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {path}: not the tokens of this model")
    assert refused.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before
