"""Stage 1: makes a raw corpus, data/raw/NAME, from the source that corpora.NAME names."""

import time
from pathlib import Path

import click

from lib.atomic import atomic_directory
from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import progress, say, warn
from lib.data.manifest import RawManifest
from lib.data.options import Corpora, CorpusOptions
from lib.data.raw_corpus import collect_documents, write_corpus
from lib.data.rejections import Rejections
from lib.data.sources import locate_files, read_documents

RAW_ROOT = Path("data/raw")
DOWNLOAD_DIR = Path("data/download")


@stage_command
@click.option(
    "--corpus",
    metavar="NAME",
    help="One of the section corpora; may be left out where there is only one.",
)
def main(params: Path, corpus: str | None) -> None:
    """Make a raw corpus: documents from a source, in random order, in compressed shards.

    Reads corpora.NAME of the parameter file. Its key source says where documents come from:

    \b
    python_stdlib  the Python standard library's own source on this machine (no
                   network); each module is a document
    files          paths, globs of .jsonl, .txt (both also .gz, .zst) and .parquet
    url            urls, downloaded to data/download; a broken download is
                   resumed, also by the next run, and used only if its sha256 is
                   right
    huggingface    dataset of the Hugging Face hub at revision, streamed

    Writes data/raw/NAME: corpus-00000.jsonl.zst and so on, a JSON object {"text", "source", "line"}
    a line, and manifest.json with counts and checksums. Documents are ordered by a hash of their
    text (key: seed), so any range of them is like any other. The folder appears whole or not at
    all, and the same input gives the same bytes.

    Empty documents are left out and counted, and with deduplicate: true so are texts that occur
    once more; for records that cannot be used see on_bad_record. While the stage works it needs
    disk space for the uncompressed corpus, and memory for one document and 0.4 bytes for each of
    the others, with deduplicate too.
    """  # noqa: D301 (click wants the backspace itself: it keeps the lines of the list)
    corpora = read_params(params).section("corpora", Corpora)
    name = corpora.choose(corpus)
    options = corpora.root[name]
    started = time.monotonic()
    rejections = Rejections(f"corpora.{name}", options)
    manifest = download_corpus(options, rejections, RAW_ROOT / name, DOWNLOAD_DIR)
    report(name, manifest, rejections, time.monotonic() - started)


def download_corpus(
    options: CorpusOptions, rejections: Rejections, raw_dir: Path, download_dir: Path
) -> RawManifest:
    """Makes ``raw_dir`` from the source, showing progress.

    Args:
        options: the section of the corpus.
        rejections: takes what is kept out.
        raw_dir: the folder to make or replace.
        download_dir: where the source ``url`` keeps its files.
    """
    if options.source == "url":
        with progress("downloading", None, "bytes") as bar:
            files = locate_files(rejections.section, options, download_dir, bar.advance)
    else:
        files = locate_files(rejections.section, options, download_dir, lambda _bytes: None)
    with atomic_directory(raw_dir) as folder:
        with progress("reading", options.max_documents, "documents") as bar:
            documents = read_documents(options, files, rejections)
            count = collect_documents(documents, options, folder, bar.advance)
        with progress("writing", count, "documents") as bar:
            return write_corpus(options, rejections, folder, bar.advance)


def report(name: str, manifest: RawManifest, rejections: Rejections, seconds: float) -> None:
    """Says what was done, and what was kept out and why."""
    stored = sum(shard.bytes for shard in manifest.shards)
    shards = "shard" + ("s" if len(manifest.shards) > 1 else "")
    say(
        f"corpus {name} from {manifest.source}: {manifest.documents:,} documents, "
        f"{manifest.text_bytes / 1e6:,.1f} MB of text in {len(manifest.shards)} {shards} "
        f"({stored / 1e6:,.1f} MB) in {RAW_ROOT / name}, {seconds:.1f} s"
    )
    if manifest.rejected:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.rejected.items())
        say(f"kept out: {kinds}")
    for example in rejections.examples:
        warn(f"left out {example}")


if __name__ == "__main__":
    main()
