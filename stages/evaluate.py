"""Stage: measures the published model on held-out text and lets it write samples."""

import json
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.operation import EvaluateConfig
from lib.config.params_file import read_params
from lib.console import progress, say, table


@stage_command
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=Path("model"),
    show_default=True,
    help="Folder of the published model.",
)
def main(params: Path, model: Path) -> None:
    r"""Measures loss, perplexity and bits per byte, and generates samples.

    \b
    Reads   model/, data/tokens, params.yaml (section evaluate)
    Writes  results/evaluate.json           figures
            results/loss_by_position.csv    loss by tokens of context, for a plot
            results/samples.md              the generated texts
    """
    options = read_params(params).section("evaluate", EvaluateConfig)
    from lib.evaluate import evaluation  # imports torch: seconds

    evaluated = evaluation.load_model(model)
    windows, num_samples = evaluation.open_split(
        evaluated, Path(evaluated.config.data.prefix), options
    )
    tokens = num_samples * windows.seq_length
    with progress(f"measuring the {options.split} split", tokens, "tokens") as counter:
        loss = evaluation.held_out_loss(evaluated, windows, num_samples, counter.advance)
    total = options.num_samples * options.max_new_tokens
    with progress("generating samples", total, "tokens") as counter:
        texts = evaluation.generate_texts(evaluated, options, counter.advance)
    figures = evaluation.metrics(evaluated, loss, texts, options)
    results = Path("results")
    page = evaluation.samples_markdown(texts, figures)
    write_text_atomically(results / "loss_by_position.csv", evaluation.loss_by_position_csv(loss))
    write_text_atomically(results / "samples.md", page)
    write_text_atomically(results / "evaluate.json", json.dumps(figures, indent=2) + "\n")
    say(page)
    table("evaluation", [(name, _shown(value)) for name, value in figures.items()])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
