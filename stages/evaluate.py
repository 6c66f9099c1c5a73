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
    """Measures loss, perplexity and bits per byte, and generates samples.

    The corpora of data.validation are measured, each by itself and all together per token.

    \b
    Reads   model/, data/tokens, the pairs of data.imported
            params.yaml (section evaluate)
    Writes  results/evaluate.json         figures
            results/loss_by_position.csv  loss by tokens of context, for a plot
            results/samples.md            the generated texts
    """  # noqa: D301  (click wants the character)
    options = read_params(params).section("evaluate", EvaluateConfig)
    from lib.evaluate import evaluation  # imports torch: seconds

    evaluated = evaluation.load_model(model)
    sets = evaluation.open_sets(evaluated, options)
    samples = sum(each.num_samples for each in sets)
    with progress(f"measuring the {options.split} split", samples, "samples") as counter:
        losses = evaluation.held_out_losses(evaluated, sets, counter.advance)
    total = options.num_samples * options.max_new_tokens
    with progress("generating samples", total, "tokens") as counter:
        texts = evaluation.generate_texts(evaluated, options, counter.advance)
    figures = evaluation.metrics(evaluated, losses, texts, options)
    results = Path("results")
    page = evaluation.samples_markdown(texts, figures)
    by_position = evaluation.loss_by_position_csv(evaluation.added_up(losses))
    write_text_atomically(results / "loss_by_position.csv", by_position)
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
