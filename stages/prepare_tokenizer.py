"""Stage 2: trains the tokenizer on the corpora, or takes one that exists already."""

import time
from collections.abc import Sequence
from pathlib import Path

from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import progress, say, warn
from lib.data.manifest import read_manifest
from lib.data.options import Corpora, TokenizerOptions
from lib.data.shards import iter_raw_documents
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, save_tokenizer
from lib.data.tokenizer_sources import keeps_text, take_tokenizer
from lib.data.tokenizer_training import TrainingText, in_turn, train_byte_level_bpe

RAW_ROOT = Path("data/raw")
TOKENIZER_DIR = Path("data/tokenizer")
_MEGABYTE = 1_000_000


@stage_command
def main(params: Path) -> None:
    """Make the tokenizer: train one on the corpora, or take one that exists already.

    Reads the sections tokenizer and corpora (the names) of the parameter file. tokenizer.kind
    says where it comes from:

    \b
    train_bpe       a byte-level BPE of tokenizer.vocab_size entries, trained on
                    the first tokenizer.train_megabytes of data/raw, where each
                    corpus has a share as large as its share of all text; the
                    same text gives the same result
    tokenizer_json  tokenizer.path, a tokenizer.json of Hugging Face's library
                    tokenizers
    gpt2            tokenizer.vocab_file and merges_file: GPT-2's vocab.json and
                    merges.txt
    sentencepiece   tokenizer.path, the .model of a SentencePiece BPE with byte
                    fallback

    Writes data/tokenizer, whole or not at all: tokenizer.json, and tokenizer_info.json with the
    vocabulary's size, the control tokens and a fingerprint that ties token files and checkpoints
    to this tokenizer.

    tokenizer.end_of_document names the control token that ends a document. A trained tokenizer
    gets it as id 0, any other must have it. Text never turns into control tokens: a document that
    spells one out gets ordinary tokens.
    """  # noqa: D301 - the backspace character tells click to keep the lines
    params_file = read_params(params)
    options = params_file.section("tokenizer", TokenizerOptions)
    names = params_file.section("corpora", Corpora).root
    started = time.monotonic()
    raw_dirs = [RAW_ROOT / name for name in names]
    if strays := sorted({*RAW_ROOT.glob("[!.]*")} - {*raw_dirs}):
        listed = ", ".join(map(str, strays[:5]))
        warn(f"of no corpus in {params}, and not read: {listed}; remove what you do not need")
    tokenizer = prepare_tokenizer(options, raw_dirs, TOKENIZER_DIR)
    end = tokenizer.info.end_of_document
    say(
        f"tokenizer ({options.kind}): {tokenizer.vocab_size:,} ids, documents end with "
        f"{end.token!r} = {end.id}, fingerprint {tokenizer.fingerprint[:12]}, in {TOKENIZER_DIR}, "
        f"{time.monotonic() - started:.1f} s"
    )


def prepare_tokenizer(
    options: TokenizerOptions, raw_dirs: Sequence[Path], output: Path
) -> TextTokenizer:
    """Makes the folder of the tokenizer, showing progress.

    Args:
        options: the section tokenizer.
        raw_dirs: the raw corpora, read for ``train_bpe`` only.
        output: the folder to make or replace.
    """
    if options.kind == "train_bpe":
        max_bytes = options.train_megabytes * _MEGABYTE
        # Sorted: in params.yaml the order of the corpora means nothing, and DVC does not see it.
        corpora = [training_text(raw_dir) for raw_dir in sorted(raw_dirs)]
        total = min(sum(corpus.text_bytes for corpus in corpora), max_bytes)
        with progress("training the tokenizer", total, "bytes") as bar:
            backend = train_byte_level_bpe(
                in_turn(corpora),
                options.vocab_size,
                options.end_of_document,
                max_bytes,
                bar.advance,
            )
    else:
        backend = take_tokenizer(options)
        if not keeps_text(backend):
            warn(
                "this tokenizer changes text (case, accents, white space or rare characters): "
                "what a model trained with it writes can only be as good"
            )
    info = describe_tokenizer(backend, options.kind, options.end_of_document)
    tokenizer = TextTokenizer(backend, info)
    save_tokenizer(output, tokenizer)
    return tokenizer


def training_text(raw_dir: Path) -> TrainingText:
    """A raw corpus as text to train on."""
    texts = (document.text for document in iter_raw_documents(raw_dir))
    return TrainingText(texts, read_manifest(raw_dir).text_bytes)


if __name__ == "__main__":
    main()
