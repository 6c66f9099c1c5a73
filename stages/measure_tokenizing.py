"""Command: measures how fast a corpus becomes token files, beside other ways to do it.

Figures of shared or throttled machines drift from minute to minute; the ratios, taken turn by turn
in one run, are what to compare.
"""

import shutil
import statistics
import tempfile
from pathlib import Path

import click

from lib.atomic import sha256_of
from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.console import bar_on_terminal, say, table
from lib.data.indexed_dataset import bin_path
from lib.data.manifest import MANIFEST_NAME
from lib.data.options import Corpora
from lib.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lib.data.tokens_manifest import TOKENS_PREFIX
from lib.errors import UserError
from lib.train.hardware import cpu_name, usable_cores
from lib.workflow.tokenizing_ways import FROM_MEMORY, OURS, WAYS, Job, Outcome, measure
from lib.workflow.varied_corpus import write_varied_corpus

RAW_ROOT = Path("data/raw")
TOKENIZER_DIR = Path("data/tokenizer")


@stage_command
@click.option("--corpus", metavar="NAME", help="The corpus to take text from.  [default: the only]")
@click.option("--megabytes", type=click.FloatRange(min=1), default=40.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--way",
    "ways",
    type=click.Choice(list(WAYS)),
    metavar="NAME",
    multiple=True,
    help=f"Only this one, and Drydock's; may be given several times. One of: {'; '.join(WAYS)}.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write the text and the tokens, three times --megabytes.  [default: a new one]",
)
def main(
    params: Path,
    corpus: str | None,
    megabytes: float,
    rounds: int,
    ways: tuple[str, ...],
    folder: Path | None,
) -> None:
    """Measures tokenising on all cores: the stage's way, Megatron's, and the libraries alone.

    Text of --megabytes is made of a corpus in data/raw by repeating and varying it. After a round
    that warms up and measures memory, the ways take turns for --rounds rounds; the table shows
    medians. "First to last" is from the first document to the last with all workers at work;
    "whole" is the process from its start to its end. The libraries alone have all text in memory
    and keep nothing of what they make. Needs data/raw and data/tokenizer
    (dvc repro prepare_tokenizer).
    """
    name = read_params(params).section("corpora", Corpora).choose(corpus)
    source = RAW_ROOT / name
    if not (source / MANIFEST_NAME).is_file() or not (TOKENIZER_DIR / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{source} or {TOKENIZER_DIR} is not there; run: dvc repro prepare_tokenizer"
        )
    with tempfile.TemporaryDirectory(prefix="tokenizing-", dir=folder) as scratch:
        measure_ways(Path(scratch), source, (megabytes, rounds), ways)


def measure_ways(
    scratch: Path, source: Path, size: tuple[float, int], chosen: tuple[str, ...]
) -> None:
    """Makes the text, lets the ways take turns, and prints the table.

    Args:
        scratch: an empty folder.
        source: the corpus to take text from, a folder as ``data/raw/NAME``.
        size: megabytes of text, and rounds.
        chosen: ways to measure beside ours; none for all.

    Raises:
        UserError: when a way fails, or Megatron's gives other tokens than ours.
    """
    megabytes, rounds = size
    job = Job(
        raw=scratch / "raw",
        lines=scratch / "corpus.jsonl",
        tokenizer=TOKENIZER_DIR,
        output=scratch / "tokens",
        workers=usable_cores(),
    )
    job.raw.mkdir()
    corpus = write_varied_corpus(source, job.raw, job.lines, int(megabytes * 1e6))
    library = load_tokenizer(TOKENIZER_DIR).library
    ways = [way for way in WAYS if way == OURS or way in chosen or not chosen]
    ways = [way for way in ways if library == "tiktoken" or not way.startswith("tiktoken")]
    outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
    tokens: set[str] = set()
    with bar_on_terminal("measuring", len(ways) * (rounds + 1), "measurements") as advance:
        for number in range(rounds + 1):
            for way in ways:
                job.output.mkdir()
                outcome = measure(way, job, memory=number == 0)
                say(f"round {number} of {rounds}: {way}: {outcome.warm:.1f} MB/s")
                outcomes[way].append(outcome)
                tokens |= {sha256_of(path) for path in job.output.rglob(_BIN)}
                shutil.rmtree(job.output)
                advance(1)
    if len(tokens) > 1:
        raise UserError("Megatron's way wrote other tokens than Drydock's: please report this")
    say(
        f"{corpus.text_bytes / 1e6:,.0f} MB of text in {corpus.documents:,} documents, varied from "
        f"{source}; Drydock encodes with {library}; {cpu_name()}"
    )
    title = f"tokenising on {job.workers} cores, medians of {rounds}"
    table(title, table_rows(outcomes, corpus.text_bytes), headers=HEADERS)


_BIN = bin_path(Path(TOKENS_PREFIX)).name
HEADERS = ("", "first to last", "Drydock / it", "whole", "Drydock / it", "most memory")


def table_rows(outcomes: dict[str, list[Outcome]], text_bytes: int) -> list[tuple[str, ...]]:
    """A row for each way, from its first outcome's memory and the speeds of the others."""
    warm = {way: statistics.median(one.warm for one in all_[1:]) for way, all_ in outcomes.items()}
    whole = {
        way: text_bytes / 1e6 / statistics.median(one.seconds for one in all_[1:])
        for way, all_ in outcomes.items()
        if way not in FROM_MEMORY
    }
    return [
        (
            way,
            f"{warm[way]:.1f} MB/s",
            f"{warm[OURS] / warm[way]:.2f}",
            f"{whole[way]:.1f} MB/s" if way in whole else "",
            f"{whole[OURS] / whole[way]:.2f}" if way in whole else "",
            f"{outcomes[way][0].memory / 1e6:,.0f} MB",
        )
        for way in outcomes
    ]


if __name__ == "__main__":
    main()
