"""Corpora of random tokens, for comparisons and measurements of training that need no text."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lib.checkpoint.corpus_facts import corpus_facts
from lib.config.data_facts import TokensFacts
from lib.config.data_section import blended_names, planned_phases, validation_names
from lib.config.run_config import Params
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.pair_description import PairTokenizer, describe_pair
from lib.data.tokens_manifest import MANIFEST_FILE, TOKENS_PREFIX, TokensManifest

EOD = 0
_SHORTEST, _LONGEST = 20, 120


def random_tokens(folder: Path, params: Params, vocab_size: int, documents: int) -> TokensFacts:
    """Writes a corpus for each name that a run reads, all different, and describes them.

    Args:
        folder: to write into.
        params: the run.
        vocab_size: of all.
        documents: of each, 70 tokens long on average.
    """
    corpora = params.corpora or ("random",)
    blended = blended_names(planned_phases(params.training, params.data), corpora)
    names = dict.fromkeys((*blended, *validation_names(params.data, blended)))
    manifests = {
        name: random_corpus(folder / name, vocab_size, documents, seed)
        for seed, name in enumerate(names, start=7)
    }
    return describe_tokens(manifests, params)


def random_corpus(folder: Path, vocab_size: int, documents: int, seed: int = 7) -> Path:
    """Writes a corpus of random tokens that no tokenizer made; gives the path of its manifest.

    Each document ends with token 0, which stands nowhere else.
    """
    generator = np.random.default_rng(seed)
    prefix = folder / TOKENS_PREFIX
    folder.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, np.uint16 if vocab_size < 65500 else np.int32) as writer:
        for _ in range(documents):
            length = int(generator.integers(_SHORTEST, _LONGEST))
            text = generator.integers(EOD + 1, vocab_size, length - 1)
            writer.add_document(np.append(text, EOD))
    tokenizer = PairTokenizer("none", EOD, np.ones(vocab_size, dtype=np.int32))
    manifest = describe_pair(IndexedDataset(prefix), tokenizer, append_eod=True)
    manifest.write(folder / MANIFEST_FILE)
    return folder / MANIFEST_FILE


def describe_tokens(manifests: Mapping[str, Path], params: Params) -> TokensFacts:
    """What a run must know of corpora that ``random_corpus`` wrote.

    Args:
        manifests: by the name of the corpus.
        params: the run, which says how they are cut and which of them it is trained on.
    """
    training = params.training
    corpora = tuple(manifests) if params.corpora is None else params.corpora
    blended = blended_names(planned_phases(training, params.data), corpora)
    described = TokensManifest.load(next(iter(manifests.values())))
    return TokensFacts(
        tokenizer_fingerprint=described.tokenizer_fingerprint,
        vocab_size=described.vocab_size,
        eod_id=described.eod_id,
        corpora={
            name: corpus_facts(
                path, training.split if name in blended else None, training.seq_length
            )
            for name, path in manifests.items()
        },
    )
