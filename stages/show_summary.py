"""Prints what a run came to: `make repro` ends with it."""

import json
from pathlib import Path
from typing import Any

import click

from lib.config.run_config import RunConfig
from lib.console import say, table
from lib.errors import UserError

NEXT_STEPS = """What to try next:
  dvc exp run -S optimizer.lr=1e-3     another learning rate; `dvc exp show` compares the runs
  edit params.yaml, then `make repro`  only what depends on the change is run again
  raise training.train_iters           the finished run continues from its last checkpoint
  make plots                           loss curves as a page that opens without a network
  params/*.yaml                        presets; `make repro PRESET=laptop` takes one"""


@click.command()
def main() -> None:
    """Shows parameters, tokens, losses, speed, a sample and where everything is."""
    try:
        figures = read_figures()
    except UserError as error:
        say(str(error))
        raise SystemExit(1) from None
    table("this run", figures)
    say(first_sample())
    say(NEXT_STEPS)


def read_figures() -> list[tuple[str, str]]:
    """Names and values of the summary's table.

    Raises:
        UserError: the pipeline has not run to its end.
    """
    config = RunConfig.load(Path("model/run_config.json"))
    train, evaluated = read_json("results/train.json"), read_json("results/evaluate.json")
    rows = [
        ("parameters", f"{config.derived.num_parameters:,}"),
        ("steps", f"{train['step']:,}"),
        ("tokens seen", f"{train['consumed_tokens']:,} ({config.derived.epochs:.2f} epochs)"),
        ("training loss, last step", f"{train['loss']:.4f} nats per token"),
    ]
    if "validation_loss" in train:
        rows.append(("validation loss", f"{train['validation_loss']:.4f} nats per token"))
    split = evaluated["split"]
    rows += [
        (f"{split} loss", f"{evaluated['loss']:.4f} nats per token"),
        (f"{split} perplexity", f"{evaluated['perplexity']:.2f}"),
        (f"{split} bits per byte", f"{evaluated['bits_per_byte']:.4f}"),
        ("unigram entropy", f"{evaluated['unigram_entropy']:.4f} nats per token (no context)"),
    ]
    if "syntax_share" in evaluated:
        rows.append(("samples that parse", f"{evaluated['syntax_share']:.0%}"))
    return [
        *rows,
        ("speed", f"{train['tokens_per_second']:,.0f} tokens/s at the last step"),
        ("model", "model/ (weights, configuration, tokenizer, record, log)"),
        ("samples", "results/samples.md"),
        ("checkpoints", "state/ (kept for longer runs; `make clean-state` removes them)"),
    ]


def read_json(path: str) -> dict[str, Any]:
    """A results file.

    Raises:
        UserError: it is not there or is damaged.
    """
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; run `make repro` to its end first") from None


def first_sample() -> str:
    """The first generated text of ``results/samples.md``."""
    page = Path("results/samples.md").read_text().split("\n~~~~\n")
    return f"A generated sample:\n\n{page[1]}\n" if len(page) > 1 else ""


if __name__ == "__main__":
    main()
