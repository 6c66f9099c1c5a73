"""Stage 3: turns a raw corpus into Megatron's token files."""

import time
from pathlib import Path

import click

from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import Counter, progress, say
from lib.data.disk import explain_full_disk
from lib.data.frame_encoding import Counts
from lib.data.manifest import read_manifest
from lib.data.options import Corpora, TokensOptions
from lib.data.tokenize import TokenizingTask, tokenize_corpus, tokenize_part
from lib.data.tokens_parts import Part

RAW_ROOT = Path("data/raw")
TOKENIZER_DIR = Path("data/tokenizer")
TOKENS_ROOT = Path("data/tokens")


@stage_command
@click.option(
    "--corpus",
    metavar="NAME",
    help="One of the section corpora; may be left out where there is only one.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Only part I (from 0) of N, for work on N machines that share data/tokens.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Work on a Ray cluster: auto, HOST:PORT, or local to start one on this machine.",
)
def main(params: Path, corpus: str | None, shard: str | None, ray: str | None) -> None:
    """Tokenise a corpus: text to token files in Megatron's format, on all cores.

    Reads the section tokens of the parameter file, data/raw/NAME and data/tokenizer. Writes
    data/tokens/NAME, whole or not at all:

    \b
    corpus_text_document.bin  the tokens of all documents, back to back: uint16
                              for vocabularies below 65,500, else int32
    corpus_text_document.idx  where each document begins, and its length
    left_out.npy              numbers of the documents of data/raw/NAME that gave
                              no tokens
    manifest.json             counts, checksums, and which tokenizer and corpus
                              they belong to

    Megatron-LM and the tools around it read the pair as it is. Documents keep the order of
    data/raw/NAME. tokens.append_eod ends each with the end-of-document token; one without tokens,
    or shorter than tokens.min_document_tokens, is left out and counted; one longer than
    tokens.max_document_tokens is cut or dropped (tokens.long_documents) and counted. tokens.workers
    sets the number of processes; the files are the same for any.

    The work in progress is in data/tokens/NAME.partial. A run that was killed goes on after the
    last shard of data/raw/NAME that it finished; remove that folder to begin anew.

    On several machines: run with --shard 0/4 on the first of four, and so on; they must share the
    project's folder. Then run without it: the four parts become data/tokens/NAME without being
    copied, with the same tokens at the same places as one run would give. With --ray the processes
    of a Ray cluster encode, and this one writes.
    """  # noqa: D301 - the backspace character tells click to keep the lines
    sections = read_params(params)
    name = sections.section("corpora", Corpora).choose(corpus)
    options = sections.section("tokens", TokensOptions)
    task = TokenizingTask(RAW_ROOT / name, TOKENIZER_DIR, TOKENS_ROOT / name, options, ray)
    part = Part.parse(shard) if shard else None
    with explain_full_disk(TOKENS_ROOT):
        if part:
            write_part(task, part)
        else:
            write_corpus(task)


def write_corpus(task: TokenizingTask) -> None:
    """Tokenises all, or joins the parts, and says what came of it."""
    raw = read_manifest(task.raw)
    started = time.monotonic()
    with progress("tokenising", raw.documents, "documents") as bar:
        manifest = tokenize_corpus(task, Watched(bar))
    say(
        f"tokens: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}) "
        f"in {task.output}, {manifest.text_bytes / manifest.tokens:.2f} bytes per token, "
        f"{time.monotonic() - started:.1f} s"
    )
    not_whole = {
        "empty": manifest.empty_documents,
        "short": manifest.short_documents,
        "cut": manifest.cut_documents,
        "dropped for their length": manifest.dropped_documents,
    }
    found = [f"{count:,} {what}" for what, count in not_whole.items() if count]
    if found:
        say(f"documents not taken whole: {', '.join(found)}")


def write_part(task: TokenizingTask, part: Part) -> None:
    """Tokenises one part, and says what is to be done next."""
    shards, _ = part.cut(read_manifest(task.raw))
    documents = sum(shard.documents for shard in shards)
    with progress(f"tokenising part {part.name}", documents, "documents") as bar:
        record = tokenize_part(task, part, Watched(bar))
    say(
        f"part {part.name}: {record.part.documents:,} documents, {record.part.tokens:,} tokens; "
        "when all parts are done, run without --shard"
    )


class Watched:
    """Shows the work on a counter of documents."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def begin(self, done: Counts) -> None:
        """Starts at what an earlier run has done."""
        if done.documents:
            say(f"goes on after {done.documents:,} documents that an earlier run has done")
            self._counter.begin_at(done.documents)

    def advance(self, done: Counts) -> None:
        """Adds a frame's documents, text and tokens."""
        self._counter.advance(done.documents, MB=done.read_bytes / 1e6, tokens=done.tokens)


if __name__ == "__main__":
    main()
