"""From documents to data/raw/NAME: put in order, cut into shards, described by a manifest."""

import platform
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import zstandard

from lib.data.disk import explain_full_disk
from lib.data.documents import RawDocument
from lib.data.manifest import RawManifest, write_manifest
from lib.data.options import CorpusOptions
from lib.data.rejections import DUPLICATE, Rejections
from lib.data.shards import write_shards
from lib.data.shuffle import gather, scatter
from lib.errors import UserError

_BUCKETS = "buckets"
_MEGABYTE = 1_000_000


def collect_documents(
    documents: Iterable[RawDocument],
    options: CorpusOptions,
    folder: Path,
    advance: Callable[[int], None],
) -> int:
    """First half: reads the source to its end, into unsorted buckets inside ``folder``.

    Args:
        documents: the corpus as its source orders it.
        options: the section of the corpus.
        folder: the folder that becomes data/raw/NAME.
        advance: called with numbers of documents done.

    Returns:
        The number of documents.
    """
    buckets = folder / _BUCKETS
    buckets.mkdir()
    with explain_full_disk(folder):
        return scatter(documents, options.seed, buckets, advance)


def write_corpus(
    options: CorpusOptions,
    rejections: Rejections,
    folder: Path,
    advance: Callable[[int], None],
) -> RawManifest:
    """Second half: from the buckets to shards, in order, and the manifest last.

    Duplicates are left out here, where equal texts come one after another.

    Args:
        options: the section of the corpus.
        rejections: what was kept out, for the manifest; takes the duplicates.
        folder: the folder that becomes data/raw/NAME, filled by ``collect_documents``.
        advance: called with numbers of documents done.

    Raises:
        UserError: if there is no document at all.
    """
    buckets = folder / _BUCKETS
    with explain_full_disk(folder):
        duplicate = partial(rejections.count, DUPLICATE) if options.deduplicate else None
        documents = gather(buckets, advance, duplicate)
        shards = write_shards(documents, folder, options.shard_megabytes * _MEGABYTE)
        shutil.rmtree(buckets)
    rejected = dict(sorted(rejections.counts.items()))
    if not shards:
        raise UserError(
            f"{rejections.section}.source = {options.source}: no document was found (kept out: "
            f"{rejected or 'none'}); check that section"
        )
    manifest = RawManifest(
        source=options.source,
        documents=sum(shard.documents for shard in shards),
        text_bytes=sum(shard.text_bytes for shard in shards),
        rejected=rejected,
        options=options.model_dump(mode="json"),
        versions={
            "python": platform.python_version(),
            "zstandard": zstandard.__version__,
        },
        shards=shards,
    )
    write_manifest(folder, manifest)
    return manifest
