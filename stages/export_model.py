"""Stage: writes the published model in the form that other programs load."""

from pathlib import Path

import click

from lib.checkpoint.json_object import read_json_object
from lib.cli import stage_command
from lib.config.operation import ExportConfig
from lib.config.params_file import read_params
from lib.console import say

_MODEL = Path("model")
_FIGURES = Path("results/train.json")
_TOKENIZER = Path("data/tokenizer")


@stage_command
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=_MODEL,
    show_default=True,
    help="Folder of a published model, or of a checkpoint: state/FINGERPRINT/iter_N.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("model_hf"),
    show_default=True,
    help="Folder to write; an export that is there is replaced.",
)
def main(params: Path, model: Path, output: Path) -> None:
    """Writes a folder for AutoModelForCausalLM and AutoTokenizer of Hugging Face's transformers.

    Models are GPT-2, Llama, Qwen2 or Qwen3, as their section model says; validate_config refuses
    before training what none of them can express (or write export.format: none).

    \b
    Reads   model/, params.yaml (section export)
            results/train.json  losses for the model's card
    Writes  model_hf/           weights, configuration, tokenizer, README.md
    """  # noqa: D301  (click wants the character)
    options = read_params(params).section("export", ExportConfig)
    figures = read_figures(_FIGURES) if model == _MODEL else {}
    from lib.checkpoint.export import export_model  # imports torch: seconds

    say(export_model(model, output, options, figures, _TOKENIZER))


def read_figures(path: Path) -> dict[str, object]:
    """The figures that pretraining left.

    Raises:
        UserError: the file is missing or damaged.
    """
    return read_json_object(path, "run: dvc repro pretrain")


if __name__ == "__main__":
    main()
