"""Stage: checks all parameters against each other and the data, and writes the run configuration.

``outputs/run_config.json`` is what pretraining consumes: every null resolved, numbers derived.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from pydantic import ValidationError

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.batch_schedule import BatchSchedule
from lib.config.data_rules import TOKENIZER_INFO, TOKENS_MANIFEST, TokenizerFacts
from lib.config.initial_weights import WEIGHTS_TOKENIZER, GivenWeights
from lib.config.launch_plan import process_count
from lib.config.operation import CONFIG_SECTIONS, LaunchConfig
from lib.config.params_file import (
    ParamsFile,
    check_params_sections,
    in_file_order,
    read_params,
)
from lib.config.project import original_path
from lib.config.rules import broken_rules
from lib.config.run_config import DataFacts, Params, RunConfig, SplitRange, resolve, resolve_model
from lib.config.schema import TrainingSection
from lib.console import say, table, warn
from lib.data.indexed_dataset import IndexedDataset
from lib.data.options import CorpusOptions, TokenizerOptions, TokensOptions
from lib.data.splits import describe_splits
from lib.data.tokens_manifest import TokensManifest
from lib.data.vocabulary import common_beginning
from lib.errors import InvalidParams, Problem, UserError
from lib.train.hardware import cuda_device_names

TOKENIZER_FILE = "data/tokenizer/tokenizer.json"
ALL_SECTIONS = {
    "corpus": CorpusOptions,
    "tokenizer": TokenizerOptions,
    "tokens": TokensOptions,
    **CONFIG_SECTIONS,
}


@stage_command
@click.option("--schema-only", is_flag=True, help="Check what needs no data; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("outputs/run_config.json"),
    show_default=True,
    help="The run configuration to write.",
)
def main(params: Path, schema_only: bool, as_json: bool, output: Path) -> None:
    """Checks every parameter and writes the run configuration.

    All problems are named at once, one a line: where, field = value: rule; remedy. Exit status 1
    if there is any.

    \b
    Reads   params.yaml (all sections)
            data/tokens/manifest.json and the .idx beside it
            data/tokenizer/tokenizer_info.json
            the record of the folder that training.initial_weights names
    Writes  outputs/run_config.json
    """  # noqa: D301  (click wants the character, not the two that r"..." would give)
    try:
        params_file = read_params(params)
        run_config = None if schema_only else validate(params_file)
        if schema_only:
            check_schema(params_file)
            warn_of_machine(params_file, len(cuda_device_names()))
    except UserError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, InvalidParams) else ()
        answer = {"ok": False, "error": str(error), "problems": [asdict(p) for p in problems]}
        say(json.dumps(answer, indent=2))
        raise SystemExit(1) from None
    if run_config is not None:
        write_text_atomically(output, run_config.to_json())
    if as_json:
        say(json.dumps({"ok": True, "error": None, "problems": []}, indent=2))
    elif run_config is not None:
        summarise(run_config)
        say(f"wrote {output}")
    else:
        say(f"{params}: {len(params_file.root)} sections are sound (the data were not looked at)")


def check_schema(params_file: ParamsFile) -> None:
    """Checks what needs no data.

    Raises:
        InvalidParams: with every problem.
    """
    _check(params_file, {})


def warn_of_machine(params_file: ParamsFile, gpus: int) -> None:
    """Warns where training would be refused on this machine, before hours go into its data.

    Only a warning: the data may be prepared on one machine for a training on another.
    """
    launch = params_file.section("launch", LaunchConfig)
    try:
        process_count(Params.from_file(params_file), launch, gpus, launch.nodes or 1)
    except UserError as error:
        warn(f"pretrain cannot run on this machine: {error}")


def validate(params_file: ParamsFile) -> RunConfig:
    """Checks everything and resolves the run configuration.

    Raises:
        InvalidParams: with every problem of the parameters.
        UserError: data are missing (only if the parameters are sound).
    """
    try:
        training = params_file.section("training", TrainingSection)
    except InvalidParams:
        check_schema(params_file)  # tells these problems and all others
        raise
    try:
        facts, tokenizer_facts = read_data_facts(training), read_tokenizer_facts()
    except UserError:
        check_schema(params_file)  # a mistake in the parameters comes before missing data
        raise
    known = _check(params_file, {"data": facts, "tokenizer_facts": tokenizer_facts})
    params = Params.from_file(params_file)
    weights, kept = known.get("weights"), known.get("kept_tokens")
    if not isinstance(weights, GivenWeights) or not isinstance(kept, int):
        return resolve(params, facts)
    model = resolve_model(params.model, training.seq_length)
    return resolve(params, facts, weights.initial(model, facts.vocab_size, kept))


def _check(
    params_file: ParamsFile, facts: dict[str, DataFacts | TokenizerFacts]
) -> dict[str, object]:
    """Gives what the rules compared, which is all sound."""
    sections, problems = check_params_sections(params_file, ALL_SECTIONS)
    known: dict[str, object] = {**sections, **facts}
    training = sections.get("training")
    if isinstance(training, TrainingSection) and training.initial_weights is not None:
        try:
            known |= read_given_weights(training.initial_weights, facts.get("tokenizer_facts"))
        except UserError as error:
            name, remedy = "training.initial_weights", "or write null to start from random weights"
            problems.append(Problem(name, training.initial_weights, str(error), remedy))
    tokenizer, data = sections.get("tokenizer"), facts.get("data")
    if isinstance(data, DataFacts):
        known["vocab_size"] = data.vocab_size
    elif isinstance(tokenizer, TokenizerOptions) and tokenizer.kind == "train_bpe":
        known["vocab_size"] = tokenizer.vocab_size
    problems = [
        replace(each, where=each.where or params_file.where(*each.field.split(".")))
        for each in (*problems, *broken_rules(known))
    ]
    if problems:
        raise InvalidParams(in_file_order(problems))
    return known


def read_given_weights(
    initial_weights: str, tokenizer_facts: DataFacts | TokenizerFacts | None
) -> dict[str, object]:
    """What the rules know of the weights to start from, and of the tokens that they know.

    Raises:
        UserError: the folder is missing or damaged.
    """
    weights = GivenWeights.read(initial_weights)
    if not isinstance(tokenizer_facts, TokenizerFacts):
        return {"weights": weights}
    return {"weights": weights, "kept_tokens": count_kept_tokens(weights, tokenizer_facts)}


def count_kept_tokens(weights: GivenWeights, tokenizer_facts: TokenizerFacts) -> int:
    """How many token ids, from 0 on, mean in data/tokenizer what they mean to the weights."""
    record, wanted = weights.record, tokenizer_facts.vocab_size
    if record.tokenizer_fingerprint == tokenizer_facts.fingerprint:
        return min(record.vocab_size, wanted)
    if record.tokenizer_fingerprint is None:
        if record.vocab_size == wanted:
            warn(
                f"the source of {weights.folder} had no tokenizer.json: its token ids are taken to "
                f"mean what they mean in data/tokenizer, since both have {wanted}"
            )
        return wanted if record.vocab_size == wanted else 0
    theirs = original_path(weights.folder) / WEIGHTS_TOKENIZER
    if WEIGHTS_TOKENIZER not in record.files or record.vocab_size > wanted:
        return 0
    return common_beginning(theirs, Path(TOKENIZER_FILE), record.vocab_size)


def read_data_facts(training: TrainingSection) -> DataFacts:
    """The facts of the tokenised corpus: its manifest, and its index cut into splits."""
    folder = Path(TOKENS_MANIFEST).parent
    manifest = TokensManifest.load(folder)
    dataset = IndexedDataset(folder / manifest.prefix)
    splits = describe_splits(dataset, training.split, training.seq_length)
    facts = {
        "prefix": (folder / manifest.prefix).as_posix(),
        "tokens_sha256": manifest.bin_sha256,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "vocab_size": manifest.vocab_size,
        "eod_id": manifest.eod_id,
        "dtype": manifest.dtype,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "splits": {
            name: SplitRange(documents=split.documents, tokens=split.tokens, samples=split.samples)
            for name, split in splits.items()
        },
    }
    try:
        return DataFacts.model_validate(facts)
    except ValidationError as error:
        raise _unusable(TOKENS_MANIFEST, error, "tokenize_corpus") from None


def read_tokenizer_facts() -> TokenizerFacts:
    """What the prepared tokenizer says of itself.

    Read as plain JSON, not by ``lib.data.tokenizer``, whose import of ``tokenizers`` would take
    longer than all the rest.
    """
    try:
        info = json.loads(Path(TOKENIZER_INFO).read_text(encoding="utf-8"))
        return TokenizerFacts(
            fingerprint=info["fingerprint"],
            vocab_size=info["vocab_size"],
            eod_id=info["end_of_document"]["id"],
        )
    except FileNotFoundError:
        raise UserError(
            f"{TOKENIZER_INFO}: not there; the prepare_tokenizer stage writes it"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unusable(TOKENIZER_INFO, error, "prepare_tokenizer") from None


def _unusable(path: str, error: Exception, stage: str) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{path}: damaged ({reason}); write it again: dvc repro --force {stage}")


def summarise(run_config: RunConfig) -> None:
    """Prints what will be trained, and on what."""
    model, training = run_config.model, run_config.training
    derived, batch = run_config.derived, run_config.training.global_batch_size
    rows = [
        ("parameters", f"{derived.num_parameters:,}"),
        ("vocabulary", f"{run_config.data.vocab_size:,} (padded: {derived.padded_vocab_size:,})"),
        (
            "layers",
            f"{model.num_layers} of width {model.hidden_size}, {model.num_attention_heads} heads "
            f"of {model.head_dim}, MLP {model.ffn_hidden_size}",
        ),
        (
            "tokens per step",
            f"{derived.tokens_per_step:,} ({batch} samples of {training.seq_length})",
        ),
        ("steps", f"{training.train_iters:,}"),
        ("tokens in all", f"{derived.train_tokens:,}"),
        ("epochs", _describe_epochs(derived.epochs)),
        *_describe_course(run_config),
    ]
    if run_config.initial.folder is not None:
        new = ", ".join(run_config.initial.new_parts) or "nothing"
        rows.append(("initial weights", f"{run_config.initial.folder}; new and random: {new}"))
    for name, split in run_config.data.splits.items():
        first, end = split.documents
        text = f"{end - first:,} documents, {split.tokens:,} tokens, {split.samples:,} samples"
        rows.append((f"{name} split", text))
    table("Run configuration", rows)


def _describe_course(run_config: RunConfig) -> list[tuple[str, str]]:
    """Batch size and learning rate over the run, in rows of a table."""
    schedule, batches = run_config.schedule, BatchSchedule.of(run_config.training)
    rows: list[tuple[str, str]] = []
    if batches.has_rampup:
        growth = f"by {batches.increment} to {batches.global_batch_size}"
        end = _in_steps(batches.samples, batches)
        rows.append(("batch ramp-up", f"from {batches.start} {growth} samples, ends at {end}"))
    rows += [
        ("warm-up", f"ends at {_in_steps(schedule.warmup_samples, batches)}"),
        ("decay", f"{schedule.decay}, ends at {_in_steps(schedule.decay_samples, batches)}"),
    ]
    if schedule.decay == "wsd":
        last = schedule.wsd_decay_samples
        length = f"{last:,} samples"
        if not batches.has_rampup:
            length = f"{last / batches.global_batch_size:,.10g} steps"
        rows.append(("last part", f"the last {length} of it"))
    return rows


def _describe_epochs(epochs: float) -> str:
    if epochs <= 1:
        return f"{epochs:.2f} of the training split"
    return f"{epochs:.2f}: each sample of the training split is seen more than once"


def _in_steps(samples: int, batches: BatchSchedule) -> str:
    if batches.has_rampup:
        return f"step {batches.iterations(samples):,} ({samples:,} samples)"
    return f"step {samples / batches.global_batch_size:,.10g}"


if __name__ == "__main__":
    main()
