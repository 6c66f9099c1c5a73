"""Stage: checks all parameters against each other and the data, and writes the run configuration.

``outputs/run_config.json`` is what pretraining consumes: every null resolved, numbers derived.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.checkpoint.corpus_facts import read_tokens
from lib.cli import stage_command
from lib.config.advice import ADVICE
from lib.config.batch_schedule import BatchSchedule
from lib.config.data_facts import Phase
from lib.config.data_rules import TOKENIZER_INFO, TokenizerFacts, read_tokenizer_facts
from lib.config.data_section import DataSection
from lib.config.initial_weights import WEIGHTS_TOKENIZER, GivenWeights
from lib.config.launch_plan import process_count
from lib.config.operation import CONFIG_SECTIONS, LaunchConfig, RuntimeConfig
from lib.config.params_file import (
    ParamsFile,
    check_params_sections,
    read_params,
)
from lib.config.project import original_path
from lib.config.rule import problems_of
from lib.config.rules import ALL_RULES
from lib.config.run_config import Params, RunConfig, resolve, resolve_model
from lib.config.schema import TrainingSection
from lib.console import say, table, warn
from lib.data.options import DATA_SECTIONS, Corpora, TokenizerOptions, TokensOptions
from lib.data.splits import SPLITS
from lib.data.vocabulary import common_beginning
from lib.errors import InvalidParams, Problem, UserError
from lib.layers.attention_limits import PACKAGE_MODULES
from lib.pipeline.simulate import bubble_formula
from lib.plan.remedies import PLAN_ADVICE
from lib.plan.vocabulary import decided_vocabulary
from lib.plan.work import works_of
from lib.train.attention_rules import ATTENTION_ADVICE, ATTENTION_RULES
from lib.train.hardware import Machine, cuda_devices, installed
from lib.train.machine_rules import machine_findings

TOKENIZER_FILE = "data/tokenizer/tokenizer.json"
ALL_SECTIONS = DATA_SECTIONS | CONFIG_SECTIONS


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

    All problems are named at once, one a line: where, field = value: rule; remedy. What is legal
    but most likely unwise, or what pretrain would refuse on this machine, is a warning of the same
    form. docs/validation.md lists the warnings and describes the JSON.

    Exit status: 0 if all is sound (there may be warnings), 1 if something is wrong or missing, 2
    for a mistake in this command line.

    \b
    Reads   params.yaml (all sections)
            data/tokens/NAME/manifest.json and the .idx beside it, of each corpus
            that is trained on or measured, and of the pairs of data.imported
            data/tokenizer/tokenizer_info.json
            the record of the folder that training.initial_weights names
    Writes  outputs/run_config.json
    """  # noqa: D301  (click wants the character, not the two that r"..." would give)
    try:
        params_file = read_params(params)
        run_config = None if schema_only else validate(params_file)
        if schema_only:
            check_schema(params_file)
    except UserError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, InvalidParams) else ()
        say(as_answer(str(error), problems, ()))
        raise SystemExit(1) from None
    here = Machine(cuda_devices(), installed(PACKAGE_MODULES))
    warnings = find_warnings(params_file, here, run_config)
    if run_config is not None:
        write_text_atomically(output, run_config.to_json())
    if as_json:
        say(as_answer(None, (), warnings))
        return
    if run_config is not None:
        summarise(run_config)
        say(f"wrote {output}")
    else:
        say(f"{params}: {len(params_file.root)} sections are sound (the data were not looked at)")
    for warning in warnings:
        warn(str(warning))


def as_answer(error: str | None, problems: Sequence[Problem], warnings: Sequence[Problem]) -> str:
    """The result for programs; docs/validation.md describes it."""
    answer = {
        "ok": error is None,
        "error": error,
        "problems": [asdict(problem) for problem in problems],
        "warnings": [asdict(warning) for warning in warnings],
    }
    return json.dumps(answer, indent=2)


def check_schema(params_file: ParamsFile) -> None:
    """Checks what needs no data.

    Raises:
        InvalidParams: with every problem.
    """
    _check(params_file, {})


def find_warnings(
    params_file: ParamsFile, here: Machine, run_config: RunConfig | None = None
) -> list[Problem]:
    """What is legal but unwise, and where training would be refused on this machine.

    The latter is only a warning, before hours go into the data: they may be prepared on one machine
    for a training on another.

    Args:
        params_file: parameters that break no rule.
        here: what this machine has.
        run_config: what they give; None where the data were not looked at.
    """
    sections, _ = check_params_sections(params_file, ALL_SECTIONS)
    config = Params.from_file(params_file)
    known: dict[str, object] = {**sections, "config": config, "bubble_formula": bubble_formula}
    known |= _known_vocabulary(sections.get("tokenizer"))
    if run_config is not None:
        known |= {"run_config": run_config, "vocab_size": run_config.data.vocab_size}
    launch = params_file.section("launch", LaunchConfig)
    runtime = params_file.section("runtime", RuntimeConfig)
    here = replace(here, nodes=launch.nodes or 1)
    known |= _planned_facts(run_config or config, known.get("vocab_size"), launch, runtime, here)
    advice = problems_of((*ADVICE, *ATTENTION_ADVICE, *PLAN_ADVICE), known)
    refused, unwise = machine_findings(config, launch, runtime, here)
    refused = [
        replace(each, rule=f"pretrain would refuse it on this machine: {each.rule}")
        for each in refused
    ]
    missing = missing_tokenizer_files(sections.get("tokenizer"))
    return params_file.located([*advice, *missing, *refused, *unwise])


def _planned_facts(
    config: RunConfig | Params,
    vocab_size: object,
    launch: LaunchConfig,
    runtime: RuntimeConfig,
    here: Machine,
) -> dict[str, object]:
    """What each GPU is to hold, and its memory; nothing on CPUs or where either is not known."""
    if launch.device == "cpu" or not here.gpus or not isinstance(vocab_size, int):
        return {}
    try:
        processes = process_count(config, launch, len(here.gpus), here.nodes)
    except InvalidParams:  # told with what this machine lacks
        return {}
    memory = min(gpu.memory_bytes for gpu in here.gpus[:processes])
    if memory == 0:
        return {}
    works = works_of(config, runtime, vocab_size, processes * here.nodes)
    return {"works": works, "gpu_memory": memory}


def validate(params_file: ParamsFile) -> RunConfig:
    """Checks everything and resolves the run configuration.

    Raises:
        InvalidParams: with every problem of the parameters.
        UserError: data are missing (only if the parameters are sound).
    """
    try:
        training = params_file.section("training", TrainingSection)
        data = params_file.section("data", DataSection)
        corpora = tuple(params_file.section("corpora", Corpora).root)
    except InvalidParams:
        check_schema(params_file)  # tells these problems and all others
        raise
    try:
        tokenizer_facts = read_tokenizer_facts()
        tokens_facts, origins = read_tokens(training, data, corpora, tokenizer_facts)
    except UserError:
        check_schema(params_file)  # a mistake in the parameters comes before missing data
        raise
    facts = {"tokens_facts": tokens_facts, "origins": origins, "tokenizer_facts": tokenizer_facts}
    known = _check(params_file, facts)
    params = Params.from_file(params_file)
    weights, kept = known.get("weights"), known.get("kept_tokens")
    if not isinstance(weights, GivenWeights) or not isinstance(kept, int):
        return resolve(params, tokens_facts)
    model = resolve_model(params.model, params.longest_seq_length)
    return resolve(params, tokens_facts, weights.initial(model, tokens_facts.vocab_size, kept))


def _check(params_file: ParamsFile, facts: Mapping[str, object]) -> dict[str, object]:
    """Gives what the rules compared, which is all sound."""
    sections, problems = check_params_sections(params_file, ALL_SECTIONS)
    known: dict[str, object] = {**sections, **facts}
    if isinstance(corpora := sections.get("corpora"), Corpora):
        known["corpora"] = tuple(corpora.root)
    training = sections.get("training")
    if isinstance(training, TrainingSection) and training.initial_weights is not None:
        try:
            known |= read_given_weights(training.initial_weights, facts.get("tokenizer_facts"))
        except UserError as error:
            name, remedy = "training.initial_weights", "or write null to start from random weights"
            problems.append(Problem(name, training.initial_weights, str(error), remedy))
    tokens, tokenizer_facts = sections.get("tokens"), facts.get("tokenizer_facts")
    known |= _known_vocabulary(sections.get("tokenizer"))
    if isinstance(tokenizer_facts, TokenizerFacts):
        known["vocab_size"] = tokenizer_facts.vocab_size
    if isinstance(tokens, TokensOptions) and "origins" not in facts:
        known["append_eod"] = tokens.append_eod
    with suppress(InvalidParams):  # the sections that are broken were told above
        known["config"] = Params.from_file(params_file)
    problems += problems_of((*ALL_RULES, *ATTENTION_RULES), known)
    if problems:
        raise InvalidParams(params_file.located(problems))
    return known


def missing_tokenizer_files(tokenizer: object) -> Iterator[Problem]:
    """Files of a given tokenizer that are not on this machine, while it has not been taken."""
    if not isinstance(tokenizer, TokenizerOptions) or Path(TOKENIZER_INFO).exists():
        return
    for key in ("path", "vocab_file", "merges_file"):
        path: str | None = getattr(tokenizer, key)
        if path is not None and not Path(path).is_file():
            yield Problem(
                f"tokenizer.{key}",
                path,
                "there is no such file here, and prepare_tokenizer would refuse it",
                "name a file of this machine, relative to the project or absolute, or set "
                "tokenizer.kind: train_bpe",
            )


def _known_vocabulary(tokenizer: object) -> dict[str, object]:
    """The size of the vocabulary, where params.yaml decides it."""
    if isinstance(tokenizer, TokenizerOptions) and (size := decided_vocabulary(tokenizer)):
        return {"vocab_size": size}
    return {}


def read_given_weights(initial_weights: str, tokenizer_facts: object) -> dict[str, object]:
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
        *_describe_course(run_config),
    ]
    if run_config.initial.folder is not None:
        new = ", ".join(run_config.initial.new_parts) or "nothing"
        rows.append(("initial weights", f"{run_config.initial.folder}; new and random: {new}"))
    table("Run configuration", [*rows, *_describe_data(run_config)])


def _describe_data(run_config: RunConfig) -> list[tuple[str, str]]:
    """The parts of the training, and what each corpus gives, in rows of a table."""
    data = run_config.data
    passes = data.passes(run_config.training.train_samples)
    rows = [
        ("epochs" if len(passes) == 1 else f"epochs of {name}", _describe_epochs(epochs))
        for name, epochs in passes.items()
    ]
    if len(data.phases) > 1 or len(passes) > 1:
        rows += [
            (f"from sample {each.from_samples:,}", _describe_phase(each)) for each in data.phases
        ]
    for name, corpus in data.corpora.items():
        is_cut = name in passes
        for split in SPLITS if is_cut else ("valid",):
            facts = corpus.splits[split]
            first, end = facts.documents
            text = f"{end - first:,} documents, {facts.tokens:,} tokens, {facts.samples:,} samples"
            rows.append((f"{name}, {split} split" if is_cut else f"{name}, to measure", text))
    return rows


def _describe_phase(phase: Phase) -> str:
    read = [name for name, weight in phase.weights.items() if weight > 0]
    shares = ", ".join(f"{name} {float(100 * phase.share(name)):.4g} %" for name in read)
    return f"{shares}, in samples of {phase.seq_length} tokens"


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
