"""Command: writes the manifest of a pair of token files that was made elsewhere."""

from pathlib import Path

import click

from lib.cli import plain_command
from lib.console import progress, say
from lib.data.indexed_dataset import IndexedDataset, bin_path
from lib.data.pair_description import PairTokenizer, describe_pair, document_ends
from lib.data.pair_verification import verify_index
from lib.data.tokenized_corpus import sidecar_path
from lib.data.tokenizer import TextTokenizer, load_tokenizer, token_byte_lengths
from lib.errors import UserError

# Tokens of the beginning that are shown as text.
_SHOWN = 32


@plain_command
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    "tokenizer_folder",
    type=click.Path(path_type=Path),
    help="Folder of the tokenizer that made the tokens, such as data/tokenizer.",
)
@click.option(
    "--append-eod/--no-append-eod",
    default=None,
    help="Whether the tokenizer's end-of-document token follows each document.",
)
def main(prefix: Path, tokenizer_folder: Path | None, append_eod: bool | None) -> None:
    """Describes the pair PREFIX.bin and PREFIX.idx, so that a run can train on it.

    Megatron's files do not say which tokenizer made them. This command reads both files wholly,
    checks every entry of the index and that every token is in the tokenizer's vocabulary, and
    writes PREFIX.manifest.json: tokenizer, counts, checksums. What no file can tell must be said
    by the options, both of which are needed.

    Then name the pair under data.imported in the parameters. A run refuses it if its tokenizer
    is not the run's.
    """
    prefix = _without_ending(prefix)
    pair = IndexedDataset(prefix)
    if tokenizer_folder is None:
        raise UserError(
            f"--tokenizer is missing: {bin_path(prefix)} does not say which tokenizer made it; "
            "give its folder, such as --tokenizer data/tokenizer"
        )
    tokenizer = load_tokenizer(tokenizer_folder)
    if append_eod is None:
        raise UserError(_ask_for_append_eod(pair, tokenizer))
    with progress(f"reading {bin_path(prefix)}", pair.tokens.nbytes, "bytes") as bar:
        manifest = describe_pair(
            pair,
            PairTokenizer(tokenizer.fingerprint, tokenizer.eod_id, token_byte_lengths(tokenizer)),
            append_eod=append_eod,
            advance=bar.advance,
        )
    manifest.write(sidecar_path(prefix))
    say(
        f"wrote {sidecar_path(prefix)}: {manifest.documents:,} documents, {manifest.tokens:,} "
        f"tokens ({manifest.dtype}), {manifest.text_bytes / max(1, manifest.tokens):.2f} bytes per "
        "token"
    )
    # The wrong tokenizer often has room for all ids: only a person sees that it is wrong.
    text = tokenizer.decode(pair.tokens[:_SHOWN].tolist())
    say(f"it begins with {text!r}: if that makes no sense, another tokenizer made it")


def _without_ending(prefix: Path) -> Path:
    """The prefix, also where one of the two files was given."""
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix


def _ask_for_append_eod(pair: IndexedDataset, tokenizer: TextTokenizer) -> str:
    verify_index(pair)
    end = tokenizer.info.end_of_document
    ends = document_ends(pair, end.id)
    return (
        f"--append-eod or --no-append-eod is missing: {ends.ended:,} of the {ends.documents:,} "
        f"documents with tokens end with {end.token!r} (token {end.id}); say whether the end of "
        "each document is marked with it"
    )


if __name__ == "__main__":
    main()
