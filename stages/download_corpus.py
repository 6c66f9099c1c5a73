"""Stage 1: makes the raw corpus, data/raw, from the source that the section corpus names."""

import time
from pathlib import Path

from lib.atomic import atomic_directory
from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import progress, say, warn
from lib.data.manifest import RawManifest
from lib.data.options import CorpusOptions
from lib.data.raw_corpus import collect_documents, write_corpus
from lib.data.rejections import Rejections
from lib.data.sources import locate_files, read_documents

RAW_DIR = Path("data/raw")
DOWNLOAD_DIR = Path("data/download")


@stage_command
def main(params: Path) -> None:
    """Make the raw corpus: documents from a source, in random order, in compressed shards.

    Reads the section corpus of the parameter file. corpus.source says where documents come from:

    \b
    python_stdlib  the Python standard library's own source on this machine (no network);
                   each module is a document
    files          corpus.paths, globs of .jsonl, .txt (both also .gz, .zst) and .parquet
    url            corpus.urls, downloaded to data/download; a broken download is resumed,
                   also by the next run, and used only if its sha256 is right
    huggingface    corpus.dataset of the Hugging Face hub at corpus.revision, streamed

    Writes data/raw: corpus-00000.jsonl.zst and so on, a JSON object {"text", "source", "line"} a
    line, and manifest.json with counts and checksums. Documents are ordered by a hash of their
    text (key: corpus.seed), so any range of them is like any other. The folder appears whole or
    not at all, and the same input gives the same bytes.

    Empty documents are left out and counted; for records that cannot be used see
    corpus.on_bad_record. Memory stays small whatever the size of the corpus; while the stage works
    it needs disk space for the uncompressed corpus.
    """  # noqa: D301 (click wants the backspace itself: it keeps the lines of the list)
    options = read_params(params).section("corpus", CorpusOptions)
    started = time.monotonic()
    rejections = Rejections(options)
    manifest = download_corpus(options, rejections, RAW_DIR, DOWNLOAD_DIR)
    report(manifest, rejections, time.monotonic() - started)


def download_corpus(
    options: CorpusOptions, rejections: Rejections, raw_dir: Path, download_dir: Path
) -> RawManifest:
    """Makes ``raw_dir`` from the source, showing progress.

    Args:
        options: the section corpus.
        rejections: takes what is kept out.
        raw_dir: the folder to make or replace.
        download_dir: where the source ``url`` keeps its files.
    """
    if options.source == "url":
        with progress("downloading", None, "bytes") as bar:
            files = locate_files(options, download_dir, bar.advance)
    else:
        files = locate_files(options, download_dir, lambda _bytes: None)
    with atomic_directory(raw_dir) as folder:
        with progress("reading", options.max_documents, "documents") as bar:
            documents = read_documents(options, files, rejections)
            count = collect_documents(documents, options, folder, bar.advance)
        with progress("writing", count, "documents") as bar:
            return write_corpus(options, rejections, folder, bar.advance)


def report(manifest: RawManifest, rejections: Rejections, seconds: float) -> None:
    """Says what was done, and what was kept out and why."""
    stored = sum(shard.bytes for shard in manifest.shards)
    shards = "shard" + ("s" if len(manifest.shards) > 1 else "")
    say(
        f"corpus from {manifest.source}: {manifest.documents:,} documents, "
        f"{manifest.text_bytes / 1e6:,.1f} MB of text in {len(manifest.shards)} {shards} "
        f"({stored / 1e6:,.1f} MB) in {RAW_DIR}, {seconds:.1f} s"
    )
    if manifest.rejected:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.rejected.items())
        say(f"kept out: {kinds}")
    for example in rejections.examples:
        warn(f"left out {example}")


if __name__ == "__main__":
    main()
