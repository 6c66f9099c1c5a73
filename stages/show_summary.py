"""Prints what a run came to: `make repro` ends with it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from lib.cli import plain_command
from lib.config.run_config import RunConfig
from lib.console import say, table
from lib.errors import UserError

NEXT_STEPS = """What to try next:
  dvc exp run -S optimizer.lr=1e-3     another learning rate; `dvc exp show` compares the runs
  edit params.yaml, then `make repro`  only what depends on the change is run again
  raise training.train_iters           the finished run continues from its last checkpoint
  make plots                           loss curves as a page that opens without a network
  params/*.yaml                        presets; `make repro PRESET=laptop` takes one"""
# Figures of one corpus, where several are measured.
_OF_ONE = "loss/"
_REMEDY = "run `make repro` to its end first"


@dataclass(frozen=True)
class Figures:
    """A results file of named figures."""

    path: Path
    values: dict[str, object]

    @classmethod
    def load(cls, path: Path) -> "Figures":
        """Reads the file.

        Raises:
            UserError: it is not there or is damaged.
        """
        try:
            values = json.loads(_read(path))
        except ValueError as error:
            raise UserError(f"{path}: damaged ({error}); {_REMEDY}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}: damaged (no mapping of figures); {_REMEDY}")
        return cls(path, values)

    def show(self, name: str, form: str, unit: str = "") -> str:
        """One figure as text; null stands for one that is not finite (a step that went wrong).

        Raises:
            UserError: there is no such figure.
        """
        value = self.values.get(name, "missing")
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return "not finite"
        if not isinstance(value, int | float):
            raise UserError(f"{self.path}: {name} is {value}, not a number; {_REMEDY}")
        return f"{value:{form}}{unit}"


@plain_command
def main() -> None:
    """Shows parameters, tokens, losses, speed, a sample and where everything is."""
    figures, sample = read_figures(), first_sample()
    table("this run", figures)
    say(sample)
    say(NEXT_STEPS)


def read_figures() -> list[tuple[str, str]]:
    """Names and values of the summary's table.

    Raises:
        UserError: the pipeline has not run to its end.
    """
    config = RunConfig.load(Path("model/run_config.json"))
    train = Figures.load(Path("results/train.json"))
    evaluated = Figures.load(Path("results/evaluate.json"))
    nats = " nats per token"
    rows = [
        ("parameters", f"{config.derived.num_parameters:,}"),
        ("steps", train.show("step", ",")),
        ("tokens seen", train.show("consumed_tokens", ",", _epochs(config))),
        ("training loss, last step", train.show("loss", ".4f", nats)),
    ]
    if "validation_loss" in train.values:
        rows.append(("validation loss", train.show("validation_loss", ".4f", nats)))
    split = evaluated.values.get("split", "held-out")
    unigram = f"{nats} (no context)"
    rows += [
        (f"{split} loss", evaluated.show("loss", ".4f", nats)),
        *(
            (f"  of {name.removeprefix(_OF_ONE)}", evaluated.show(name, ".4f", nats))
            for name in evaluated.values
            if name.startswith(_OF_ONE)
        ),
        (f"{split} perplexity", evaluated.show("perplexity", ".2f")),
        (f"{split} bits per byte", evaluated.show("bits_per_byte", ".4f")),
        ("unigram entropy", evaluated.show("unigram_entropy", ".4f", unigram)),
    ]
    if "syntax_share" in evaluated.values:
        rows.append(("samples that parse", evaluated.show("syntax_share", ".0%")))
    export = "none (export.format)"
    if Path("model_hf/config.json").is_file():
        export = "model_hf/ (for Hugging Face's transformers and what reads the same files)"
    return [
        *rows,
        ("speed", train.show("tokens_per_second", ",.0f", " tokens/s at the last step")),
        ("model", "model/ (weights, configuration, tokenizer, record, log)"),
        ("export", export),
        ("samples", "results/samples.md"),
        ("checkpoints", "state/ (kept for longer runs; `make clean-state` removes old ones)"),
    ]


def _epochs(config: RunConfig) -> str:
    return f" ({config.derived.epochs:.2f} epochs)"


def first_sample() -> str:
    """The first generated text of ``results/samples.md``.

    Raises:
        UserError: the file is not there.
    """
    page = _read(Path("results/samples.md")).split("\n~~~~\n")
    return f"A generated sample:\n\n{page[1]}\n" if len(page) > 1 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_REMEDY}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {_REMEDY}") from None


if __name__ == "__main__":
    main()
