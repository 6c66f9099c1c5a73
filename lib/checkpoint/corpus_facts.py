"""What the parameters and a run configuration need to know of tokenised corpora.

Read from their manifests and the ends of their indexes: no token is looked at.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from lib.config.data_facts import CorpusFacts, SplitRange, TokensFacts
from lib.config.data_rules import TokenizerFacts, TokensOrigin
from lib.config.data_section import (
    DataSection,
    blended_names,
    planned_phases,
    validation_names,
)
from lib.config.project import original_path
from lib.config.schema import TrainingShape
from lib.data.splits import SPLITS, SplitFacts, describe_splits, whole_split
from lib.data.tokenized_corpus import TokenizedCorpus, sidecar_path
from lib.data.tokens_manifest import MANIFEST_FILE, TokensManifest
from lib.errors import UserError

TOKENS_FOLDER = Path("data/tokens")


def read_tokens(
    training: TrainingShape,
    data: DataSection,
    corpora: Sequence[str],
    tokenizer_facts: TokenizerFacts,
) -> tuple[TokensFacts, dict[str, TokensOrigin]]:
    """Facts and origin of each corpus that is trained on or measured, by name.

    Args:
        training: how corpora are split, and the length of their samples.
        data: the section; names in it that no corpus has are left out.
        corpora: names of the section ``corpora``.
        tokenizer_facts: the tokenizer that all of them should be made by.

    Raises:
        UserError: a file is missing or damaged.
    """
    blended = blended_names(planned_phases(training, data), corpora)
    facts: dict[str, CorpusFacts] = {}
    origins: dict[str, TokensOrigin] = {}
    for name in sorted({*blended, *validation_names(data, blended)}):
        if name in corpora or name in data.imported:
            manifest = manifest_path(name, data)
            split = training.split if name in blended else None
            facts[name] = corpus_facts(manifest, split, training.seq_length)
            origins[name] = _origin(manifest, data.imported.get(name))
    tokens_facts = TokensFacts(
        tokenizer_fingerprint=tokenizer_facts.fingerprint,
        vocab_size=tokenizer_facts.vocab_size,
        eod_id=tokenizer_facts.eod_id,
        corpora=facts,
    )
    return tokens_facts, origins


def manifest_path(name: str, data: DataSection) -> Path:
    """Where the manifest of a corpus is: this workflow's, or the one beside an imported pair."""
    if name not in data.imported:
        return TOKENS_FOLDER / name / MANIFEST_FILE
    path = sidecar_path(Path(data.imported[name]))
    original = original_path(path.as_posix())
    return path if path.exists() or not original.exists() else original


def _origin(manifest: Path, imported: str | None) -> TokensOrigin:
    described = TokensManifest.load(manifest)
    tokenizer = TokenizerFacts(
        fingerprint=described.tokenizer_fingerprint,
        vocab_size=described.vocab_size,
        eod_id=described.eod_id,
    )
    return TokensOrigin(manifest.as_posix(), tokenizer, described.append_eod, imported)


def corpus_facts(manifest: Path, split: str | None, seq_length: int) -> CorpusFacts:
    """Opens a corpus and cuts it into its splits.

    Args:
        manifest: path of its manifest.
        split: shares of documents, ``training.split``; None for a corpus that is measured only,
            as a whole.
        seq_length: tokens of the samples that are counted.

    Raises:
        UserError: a file is missing or damaged, or not the one that the manifest describes.
    """
    corpus = TokenizedCorpus.open(manifest)
    if split is None:
        empty = SplitFacts(documents=(0, 0), first_token=0, tokens=0, samples=0)
        found = dict.fromkeys(SPLITS, whole_split(corpus, seq_length)) | {"train": empty}
    else:
        found = describe_splits(corpus, split, seq_length)
    facts = {
        "manifest": manifest.as_posix(),
        "tokens_sha256": corpus.manifest.tokens_sha256,
        "dtype": corpus.manifest.dtype,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "splits": {
            name: SplitRange(documents=each.documents, tokens=each.tokens, samples=each.samples)
            for name, each in found.items()
        },
    }
    try:
        return CorpusFacts.model_validate(facts)
    except ValidationError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{manifest}: damaged ({reason}); write it again") from None
