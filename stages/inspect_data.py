"""Command: what a run reads: the documents behind a step, a sample, a corpus, and its checks.

It needs no GPU and no torch, and changes nothing.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click
from rich.markup import escape

from lib.atomic import write_text_atomically
from lib.checkpoint.corpus_facts import manifest_path
from lib.checkpoint.run_data import open_samples
from lib.cli import plain_command, stage_command
from lib.config.data_section import DataSection
from lib.config.params_file import read_params
from lib.config.run_config import RunConfig
from lib.console import progress, say, table, warn
from lib.data.corpus_summary import CorpusSummary, count_token, summarise, unknown_token
from lib.data.corpus_verification import verify_corpus
from lib.data.length_drawing import as_svg, as_text
from lib.data.manifest import RawManifest
from lib.data.options import Corpora
from lib.data.provenance import raw_manifest_of
from lib.data.samples import SampleWindows
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokenizer import TextTokenizer, load_tokenizer
from lib.data.tokens_manifest import TokensManifest
from lib.errors import UserError
from lib.output_file import OutputFile
from lib.workflow.sample_view import SampleView
from lib.workflow.step_documents import FoundPiece, FoundSample, RankLayout, RunDocuments, Step

RAW_ROOT = Path("data/raw")
TOKENIZER_FOLDER = Path("data/tokenizer")
# Characters of a text that are shown.
_SHOWN = 60

Split = Literal["train", "valid", "test"]

_run_config = click.option(
    "--run-config",
    type=click.Path(path_type=Path),
    default=Path("outputs/run_config.json"),
    show_default=True,
    help="The run; model/run_config.json is that of the finished model.",
)
_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for programs: one object a line."
)


@click.group(context_settings={"max_content_width": 100})
def main() -> None:
    """Looks at data: the documents behind a training step, a sample token by token, a corpus.

    Each of the commands below has a --help of its own. They read the files of the project and
    change none; only --picture writes one.
    """


@plain_command
@click.argument("number", metavar="STEP", type=int)
@click.option("--rank", type=int, help="Only what this process read, micro batch by micro batch.")
@click.option(
    "--layout",
    metavar="KEY=N,...",
    help="What was otherwise in that step: tensor, pipeline, data, micro_batch_size.",
)
@_run_config
@_as_json
def step(
    number: int, rank: int | None, layout: str | None, run_config: Path, as_json: bool
) -> None:
    """Shows the documents behind training step STEP, counted from 1 as in the log.

    Of each sample: its corpus and number, and the documents in it, with source file, line, and the
    beginning of the text; --json has the whole text. Nothing is recorded while training: which
    samples a step reads follows from the run configuration alone.

    With --rank R only the samples of process R are shown. Which these are depends on the layout;
    the one of the run configuration is taken unless --layout says what was otherwise.
    """
    config = RunConfig.load(run_config)
    chosen = Step.of(config, number)
    head, groups = _positions_of(config, chosen, rank, layout)
    documents = RunDocuments(config, RAW_ROOT, TOKENIZER_FOLDER)
    _tell_missing(documents, [n for n, w in config.data.phases[chosen.phase].weights.items() if w])
    if not as_json:
        say(head)
    for name, positions in groups.items():
        if name and not as_json:
            say(name)
        for found in documents.behind(chosen, positions):
            if as_json:
                say(json.dumps(_as_object(found) | ({"group": name} if name else {})))
            else:
                _show_sample(found)


def _positions_of(
    config: RunConfig, chosen: Step, rank: int | None, layout: str | None
) -> tuple[str, dict[str, list[int]]]:
    """What is shown, in words, and the positions to show: of all ranks, or by micro batch."""
    head = (
        f"step {chosen.number}: {chosen.samples} samples of {chosen.seq_length} tokens, from "
        f"position {chosen.consumed_samples:,} of the run on"
    )
    if rank is None:
        if layout is not None:
            raise UserError("--layout: all ranks together read the same in any; give --rank too")
        return head, {"": chosen.positions().tolist()}
    laid_out = RankLayout.of(config, chosen, layout)
    rows = laid_out.positions(chosen, rank).tolist()
    copy = f"rank {rank} reads for copy {laid_out.copy_of(rank)} of {laid_out.data}"
    groups = {f"micro batch {place}": row for place, row in enumerate(rows)}
    return f"{head}; {copy}", groups


def _show_sample(found: FoundSample) -> None:
    say(f"  position {found.position:,}: {found.corpus} {found.sample:,}")
    for each in found.pieces:
        say(f"    {_describe(each)}")
        say(f"      {_beginning(each.origin.text)}")


def _tell_missing(documents: RunDocuments, names: Iterable[str]) -> None:
    """Says of which corpora texts are decoded, and why."""
    for name in names:
        missing = documents.origins_of(name).missing
        if missing is not None:
            warn(f"{name}: {missing}; its texts are decoded from tokens")


@plain_command
@click.argument("corpus")
@click.argument("number", metavar="SAMPLE", type=int)
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test"]),
    help="Of which split.  [default: train; valid for a corpus that is only measured]",
)
@click.option("--seq-length", type=int, help="Of a later phase.  [default: training.seq_length]")
@_run_config
@_as_json
def sample(
    corpus: str,
    number: int,
    split: Split | None,
    seq_length: int | None,
    run_config: Path,
    as_json: bool,
) -> None:
    """Shows sample SAMPLE of a corpus token by token, as the model sees it.

    For each token: its place in the sample, its position, the first place it attends to, its id
    and text, the label, and whether that counts in the loss, all under the section data of the
    run. A line marks where a document begins.
    """
    config = RunConfig.load(run_config)
    windows = _windows_of(config, corpus, split, seq_length)
    if not 0 <= number < windows.num_samples:
        raise UserError(
            f"sample {number}: this split of {corpus} has {windows.num_samples:,} samples of "
            f"{windows.seq_length} tokens, from 0 on; give one of them"
        )
    documents = RunDocuments(config, RAW_ROOT, TOKENIZER_FOLDER)
    found = documents.find(-1, corpus, number, windows)
    rows = SampleView.of(windows, number, config.data).rows(documents.tokenizer)
    _tell_missing(documents, [corpus])
    if as_json:
        say(json.dumps(_as_object(found) | {"tokens": list(rows)}))
        return
    say(f"{corpus} {number:,}: tokens {found.start:,} to {found.start + windows.seq_length:,}")
    say(" place position sees-from   token   label counts text")
    for line in _token_lines(found, rows):
        say(line)


def _windows_of(
    config: RunConfig, corpus: str, split: Split | None, seq_length: int | None
) -> SampleWindows:
    """The samples that are meant, for good arguments."""
    data = config.data
    if corpus not in data.corpora:
        raise UserError(f"{corpus}: no corpus of this run; it has: {', '.join(data.corpora)}")
    is_trained = corpus in data.trained
    if split == "train" and not is_trained:
        raise UserError(f"--split train: {corpus} is only measured; give valid or test")
    if seq_length is not None and seq_length < 1:
        raise UserError(f"--seq-length {seq_length}: must be 1 or more; leave it out for the run's")
    chosen = split or ("train" if is_trained else "valid")
    return open_samples(config, corpus, chosen, seq_length or config.training.seq_length)


def _token_lines(found: FoundSample, rows: Iterator[dict[str, object]]) -> Iterator[str]:
    begins = {each.piece.place: each for each in found.pieces}
    for row in rows:
        if row["place"] in begins:
            yield f"-- {_describe(begins[int(str(row['place']))])}"
        counts = "yes" if row["counts"] else "no"
        numbers = f"{row['place']:>6} {row['position']:>8} {row['sees_from']:>9} {row['token']:>7}"
        yield f"{numbers} {row['label']:>7} {counts:>6} {row['text']!r}"


def _describe(found: FoundPiece) -> str:
    """A piece of a document, and where the document came from."""
    piece, origin = found.piece, found.origin
    text = f"document {piece.document:,}"
    if origin.source is not None:
        line = "" if origin.line is None else f", line {origin.line:,}"
        text += f" (raw {origin.raw_document:,}): {origin.source}{line}"
    return f"{text}; tokens {piece.first:,} to {piece.last - 1:,} of {piece.length:,}"


def _beginning(text: str) -> str:
    more = "..." if len(text) > _SHOWN else ""
    return f"{text[:_SHOWN]!r}{more}"


def _as_object(sample: FoundSample) -> dict[str, object]:
    pieces = [asdict(found.piece) | found.origin._asdict() for found in sample.pieces]
    return {
        "position": sample.position,
        "corpus": sample.corpus,
        "sample": sample.sample,
        "start": sample.start,
        "documents": pieces,
    }


@stage_command
@click.argument("name", required=False)
@click.option(
    "--picture",
    type=OutputFile(),
    help="Write the lengths of the documents of corpus NAME as SVG.",
)
def corpus(params: Path, name: str | None, picture: Path | None) -> None:
    """Summarises corpus NAME, or all corpora of the parameter file.

    Documents, tokens, bytes per token, what was kept out and left out, exact duplicates, unknown
    tokens, and how long the documents are. Only indexes are read, and tokens where the tokenizer
    has an unknown token.
    """
    chosen = _choose(params, name)
    if picture is not None and len(chosen) > 1:
        raise UserError(f"--picture {picture}: is of one corpus; name one of {', '.join(chosen)}")
    tokenizer = load_tokenizer(TOKENIZER_FOLDER)
    for each, path in chosen.items():
        opened = TokenizedCorpus.open(path)
        with progress(f"looking at {each}", opened.num_documents, "documents") as bar:
            summary = summarise(opened, bar.advance)
        rows = _summary_rows(opened, summary, raw_manifest_of(opened, RAW_ROOT / each))
        rows.append(("unknown tokens", _count_unknown(opened, tokenizer)))
        table(f"Corpus {each}", [(title, escape(value)) for title, value in rows])
        if not opened.num_documents:
            continue
        say(as_text(summary.lengths, shutil.get_terminal_size((100, 24)).columns))
        if picture is not None:
            write_text_atomically(picture, as_svg(summary.lengths, f"{each}: lengths in tokens"))
            say(f"wrote {picture}")


def _choose(params: Path, name: str | None) -> dict[str, Path]:
    """The manifests of the corpora that are meant, by name."""
    file = read_params(params)
    data = file.section("data", DataSection)
    names = [*file.section("corpora", Corpora).root, *data.imported]
    if name is not None and name not in names:
        raise UserError(f"{name}: no corpus of {params}; it has: {', '.join(names)}")
    return {each: manifest_path(each, data) for each in names if name in (None, each)}


def _summary_rows(
    corpus: TokenizedCorpus, summary: CorpusSummary, raw: RawManifest | None
) -> list[tuple[str, str]]:
    manifest, lengths = corpus.manifest, summary.lengths
    mean = corpus.num_tokens / max(1, corpus.num_documents)
    duplicates = (
        "not counted: tokens made elsewhere are in no order that brings equal ones together"
    )
    if summary.duplicates is not None:
        duplicates = f"{summary.duplicates:,} (equal to an earlier document)"
    return [
        ("documents", f"{corpus.num_documents:,} in {len(corpus.parts)} pair(s) of files"),
        ("tokens", f"{corpus.num_tokens:,} ({corpus.dtype.name})"),
        ("bytes per token", f"{manifest.text_bytes / max(1, corpus.num_tokens):.3f}"),
        (
            "tokens per document",
            f"{mean:,.1f} on average, {lengths.shortest:,} to {lengths.longest:,}",
        ),
        ("exact duplicates", duplicates),
        ("records kept out of data/raw", _kept_out(raw)),
        ("documents left out of the tokens", _left_out(manifest)),
    ]


def _kept_out(raw: RawManifest | None) -> str:
    if raw is None:
        return "not known: the raw corpus of these tokens is not at hand"
    return ", ".join(f"{count:,} {kind}" for kind, count in raw.rejected.items()) or "none"


def _left_out(manifest: TokensManifest) -> str:
    counts = {
        "empty": manifest.empty_documents,
        "too short": manifest.short_documents,
        "too long": manifest.dropped_documents,
        "cut to the upper limit (kept)": manifest.cut_documents,
    }
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count) or "none"


def _count_unknown(corpus: TokenizedCorpus, tokenizer: TextTokenizer) -> str:
    if tokenizer.fingerprint != corpus.manifest.tokenizer_fingerprint:
        return f"not known: {TOKENIZER_FOLDER} is another tokenizer than the one of these tokens"
    token = unknown_token(tokenizer)
    if token is None:
        return "none: the tokenizer has no unknown token"
    with progress("counting unknown tokens", corpus.num_tokens, "tokens") as bar:
        return f"{count_token(corpus, token, bar.advance):,}"


@stage_command
@click.argument("name", required=False)
def verify(params: Path, name: str | None) -> None:
    """Checks every byte of the tokens of corpus NAME, or of all corpora of the parameter file.

    Against the manifest: the sha256 and counts of each .bin and .idx, every entry of the index,
    that no token is outside the vocabulary, and which documents were left out. Exit status 1 at the
    first file that is not right.
    """
    for each, path in _choose(params, name).items():
        corpus = TokenizedCorpus.open(path)
        size = sum(pair.tokens.nbytes for pair in corpus.parts)
        with progress(f"reading {each}", size, "bytes") as bar:
            verify_corpus(corpus, path, RAW_ROOT / each, bar.advance)
        say(
            f"{each}: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, "
            f"{2 * len(corpus.parts)} files: all as {path} says"
        )


for command in (step, sample, corpus, verify):
    main.add_command(command)

if __name__ == "__main__":
    main()
