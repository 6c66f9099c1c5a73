"""The tokens that a run configuration means: opened, and held against what it says of them.

Training, evaluation and whoever tells later what a step saw read through here. Needs no torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from lib.config.data_facts import DataFacts
from lib.config.run_config import RunConfig
from lib.data.blended_samples import BlendedSamples
from lib.data.order import SampleOrder
from lib.data.samples import SampleWindows
from lib.data.splits import describe_splits, whole_split
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import TokensManifest
from lib.errors import UserError


def training_samples(config: RunConfig) -> BlendedSamples:
    """The samples of training, read on demand.

    Raises:
        UserError: as ``open_samples``.
    """
    order = SampleOrder.of_phases(config.data.phases, config.training.seed)
    windows = [
        [open_samples(config, name, "train", phase.seq_length) for name in order.names]
        for phase in config.data.phases
    ]
    return BlendedSamples(windows, order)


def require_tokens(
    data: DataFacts,
    names: Iterable[str],
    whose: str = "the run configuration",
    remedy: str = "run: dvc repro validate_config",
) -> None:
    """Refuses tokens other than those a run configuration was made for, by their manifests.

    Args:
        data: of the run configuration.
        names: the corpora to look at.
        whose: whose tokens they should be, for the message.
        remedy: what to do, likewise.

    Raises:
        UserError: a manifest is missing, damaged or another one.
    """
    for name in names:
        path = Path(data.corpora[name].manifest)
        found = TokensManifest.load(path).differences(
            tokens_sha256=data.corpora[name].tokens_sha256,
            tokenizer_fingerprint=data.tokenizer_fingerprint,
            vocab_size=data.vocab_size,
        )
        if found:
            raise UserError(f"{path}: not the tokens of {whose}: {'; '.join(found)}; {remedy}")


def open_samples(
    config: RunConfig, name: str, split: Literal["train", "valid", "test"], seq_length: int
) -> SampleWindows:
    """The samples of one split of a corpus; one that is not trained on is measured as a whole.

    Raises:
        UserError: a file is missing or damaged, or the split is not the one that the configuration
            describes.
    """
    described = config.data.corpora[name]
    corpus = TokenizedCorpus.open(Path(described.manifest))
    if name in config.data.trained:
        facts = describe_splits(corpus, config.training.split, seq_length)[split]
    else:
        facts = whole_split(corpus, seq_length)
    expected = described.splits[split].tokens
    if facts.tokens != expected:
        raise UserError(
            f"{described.manifest}: the {split} split has {facts.tokens} tokens, but the run "
            f"configuration was made for {expected}; run validate_config again"
        )
    return SampleWindows(corpus, facts, seq_length)
