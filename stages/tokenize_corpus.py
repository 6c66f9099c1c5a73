"""Stage 3: turns the raw corpus into Megatron's token files."""

import time
from pathlib import Path

from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import progress, say
from lib.data.disk import explain_full_disk
from lib.data.manifest import read_manifest
from lib.data.options import TokensOptions
from lib.data.shards import iter_raw_documents
from lib.data.tokenize import Corpus, tokenize_corpus
from lib.data.tokens_manifest import TokensManifest

RAW_DIR = Path("data/raw")
TOKENIZER_DIR = Path("data/tokenizer")
TOKENS_DIR = Path("data/tokens")


@stage_command
def main(params: Path) -> None:
    """Tokenise the corpus: text to token files in Megatron's format, on all cores.

    Reads the section tokens of the parameter file, data/raw and data/tokenizer. Writes data/tokens,
    whole or not at all:

    \b
    corpus_text_document.bin  the tokens of all documents, back to back: uint16 for vocabularies
                              below 65,500, else int32
    corpus_text_document.idx  where each document begins, and its length
    manifest.json             counts, checksums, and which tokenizer and corpus they belong to

    Megatron-LM and the tools around it read the pair as it is. Documents keep the order of
    data/raw. tokens.append_eod ends each with the end-of-document token; an empty document is left
    out and counted; one longer than tokens.max_document_tokens is cut or dropped
    (tokens.long_documents) and counted. tokens.workers sets the number of processes; the files are
    the same for any.
    """  # noqa: D301 - the backspace character tells click to keep the lines
    options = read_params(params).section("tokens", TokensOptions)
    started = time.monotonic()
    raw = read_manifest(RAW_DIR)
    texts = (document.text for document in iter_raw_documents(RAW_DIR))
    corpus = Corpus(texts, raw.text_bytes, raw.corpus_sha256())
    with (
        explain_full_disk(TOKENS_DIR),
        progress("tokenising", raw.documents, "documents") as bar,
    ):
        manifest = tokenize_corpus(corpus, TOKENIZER_DIR, TOKENS_DIR, options, bar.advance)
    report(manifest, raw.text_bytes, time.monotonic() - started)


def report(manifest: TokensManifest, text_bytes: int, seconds: float) -> None:
    """Says what was done, and what was left out and why."""
    say(
        f"tokens: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}) "
        f"in {TOKENS_DIR}, {manifest.text_bytes / manifest.tokens:.2f} bytes per token, "
        f"{seconds:.1f} s, {text_bytes / 1e6 / seconds:.1f} MB/s"
    )
    left_out = {
        "empty": manifest.empty_documents,
        "cut": manifest.cut_documents,
        "dropped for their length": manifest.dropped_documents,
    }
    found = [f"{count:,} {what}" for what, count in left_out.items() if count]
    if found:
        say(f"documents not taken whole: {', '.join(found)}")


if __name__ == "__main__":
    main()
