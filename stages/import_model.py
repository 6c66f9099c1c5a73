"""Command: makes a weights folder, from which training can start, of weights from elsewhere."""

import json
import re
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.initial_weights import WEIGHTS_FILE, WEIGHTS_TOKENIZER, WeightsRecord
from lib.config.operation import CONFIG_SECTIONS
from lib.config.params_file import ParamsFile, parse_params, read_params, read_params_sections
from lib.config.presets import merge_preset, to_text
from lib.console import say
from lib.data.options import DATA_SECTIONS
from lib.errors import UserError

ALL_SECTIONS = DATA_SECTIONS | CONFIG_SECTIONS
DATA_TOKENIZER = Path("data/tokenizer")
# The run's own choice: it depends on how the model is laid over processes.
_NOT_WRITTEN = "vocab_size_multiple"
# What YAML cannot take for a number or a truth value.
_PLAIN = re.compile(r"[a-z_]{3,}|[A-Za-z_.][A-Za-z0-9_.-]*[/@][A-Za-z0-9_./@-]*")


@stage_command
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("initial"),
    show_default=True,
    help="The weights folder to make or replace.",
)
@click.option(
    "--set-params", is_flag=True, help="Write the parameters into the parameter file, too."
)
def main(params: Path, source: Path, output: Path, set_params: bool) -> None:
    """Converts the weights in the folder SOURCE into a weights folder that training starts from.

    \b
    SOURCE  a Hugging Face folder  config.json, one or several .safetensors files
            a published model      model/ of this project
            a checkpoint           state/FINGERPRINT/iter_N of this project
    Writes  initial/               model.safetensors, weights.json, and
                                   tokenizer.json if there is one

    Nothing in SOURCE is run: pickles (pytorch_model.bin) are refused, its Python files ignored.

    Then prints the parameters of a run that starts from these weights; with --set-params they are
    written into params.yaml, whose comments stay. training.initial_weights names the folder and
    its checksum, so `dvc repro` trains anew whenever it is made to name other weights.
    """  # noqa: D301  (click wants the character, not the two that r"..." would give)
    params_file = read_params(params) if set_params else None
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"--output {output}: would replace {source} itself; give another folder")
    from lib.checkpoint.initial_weights import write_weights  # imports torch: seconds
    from lib.checkpoint.weight_sources import read_source

    read = read_source(source, DATA_TOKENIZER)
    record = write_weights(
        output,
        read.tensors,
        read.model,
        read.description,
        tokenizer=read.tokenizer,
        tokenizer_fingerprint=read.tokenizer_fingerprint,
    )
    numbers = sum(tensor.numel() for tensor in read.tensors.values())
    say(f"wrote {output}: {numbers:,} weights of {read.description}, {record.vocab_size:,} tokens")
    if read.padding_rows:
        say(
            f"left out {read.padding_rows} rows of the vocabulary tables: padding, as the "
            f"tokenizer has {record.vocab_size} tokens"
        )
    text = wanted_params(record, output, read.end_of_document)
    if params_file is None:
        say(f"to start from these weights, put this into {params} (or: --set-params):\n{text}")
    else:
        set_in_file(params_file, text)
    say("then: dvc repro")


def wanted_params(record: WeightsRecord, folder: Path, end_of_document: str | None) -> str:
    """The parameters of a run that goes on with these weights, as YAML.

    Args:
        record: of the weights folder.
        folder: where it is.
        end_of_document: the token that ends a document, if it is known.
    """
    path = (folder / WEIGHTS_TOKENIZER).as_posix()
    tokenizer: dict[str, object] = {"kind": "tokenizer_json", "path": path}
    tokenizer |= {"vocab_file": None, "merges_file": None}
    if end_of_document is not None:
        tokenizer["end_of_document"] = end_of_document
    model = {k: v for k, v in record.model.model_dump().items() if k != _NOT_WRITTEN}
    pin = record.files[WEIGHTS_FILE].sha256[:16]
    sections = {
        "tokenizer": tokenizer if WEIGHTS_TOKENIZER in record.files else {},
        "model": model,
        "training": {"initial_weights": f"{folder.as_posix()}@{pin}"},
    }
    lines: list[str] = []
    for section, keys in sections.items():
        lines += [f"{section}:"] if keys else []
        lines += [f"  {key}: {_spelled(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def set_in_file(params_file: ParamsFile, text: str) -> None:
    """Writes parameters into a parameter file and says each change.

    Raises:
        InvalidParams: the file would be none that can be used; it is left as it is.
    """
    changes = merge_preset(params_file, parse_params(text, Path("the imported weights")))
    merged = to_text(params_file)
    read_params_sections(parse_params(merged, params_file.path), ALL_SECTIONS)
    write_text_atomically(params_file.path, merged)
    for change in changes:
        if change.old != change.new:
            say(f"{change.field}: {change.old} -> {change.new}")
    say(f"wrote {params_file.path}")


def _spelled(value: object) -> str:
    """A value in YAML; words and paths plain, other texts in quotes, each float with its point."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


if __name__ == "__main__":
    main()
