"""Command: what the run of params.yaml needs of a GPU, in memory and time; or the best layout.

Nothing runs and no GPU is needed: the formulas of lib/plan know the code's buffers and rates of
GPUs. docs/planning.md says what is counted.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import click
from ruamel.yaml.comments import CommentedMap

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.advice import pipeline_waits_little
from lib.config.launch_plan import process_count
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.params_file import ParamsFile, read_params
from lib.config.presets import Change, merge_preset, to_text
from lib.config.rule import problems_of
from lib.config.rules import broken_rules
from lib.config.run_config import Params
from lib.console import say, table, warn
from lib.errors import InvalidParams, UserError
from lib.output_file import OutputFile
from lib.pipeline.simulate import bubble_formula
from lib.plan.ceilings import Ceilings, known_ceilings, read_ceilings
from lib.plan.memory import GIB, peak_memory, stage_memories
from lib.plan.picture import as_svg
from lib.plan.remedies import PLAN_ADVICE
from lib.plan.report import (
    RANK_HEADERS,
    STAGE_HEADERS,
    as_mapping,
    figure_rows,
    ranked_rows,
    rates_text,
    search_mapping,
    stage_rows,
)
from lib.plan.search import Candidate, Found, Machines, search
from lib.plan.time import step_time
from lib.plan.vocabulary import vocabulary_of
from lib.plan.work import Work, works_of
from lib.train.hardware import cuda_device_names, cuda_memory_bytes

_SHOWN = 15
_POSITIVE = click.FloatRange(min=0, min_open=True)


class Options(TypedDict):
    """The command line, as click passes it."""

    gpus: int | None
    nodes: int | None
    gpu: str | None
    memory: float | None
    ceilings: Path | None
    vocab_size: int | None
    search: bool
    write: bool
    as_json: bool
    picture: Path | None


@stage_command
@click.option("--gpus", type=click.IntRange(1), help="GPUs of a node.  [default: of this machine]")
@click.option("--nodes", type=click.IntRange(1), help="[default: launch.nodes, or 1]")
@click.option(
    "--gpu", help="Their kind, such as H200 or A100-SXM4-80GB.  [default: this machine's]"
)
@click.option("--memory", type=_POSITIVE, help="Of a GPU, GiB.  [default: as its kind has]")
@click.option(
    "--ceilings",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measured rates: a record of check_hardware --json, or as docs/planning.md says.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    help="Tokens.  [default: tokenizer.vocab_size; data/tokenizer's if it is not trained]",
)
@click.option("--search", is_flag=True, help="Rank all layouts by expected tokens/s.")
@click.option("--write", is_flag=True, help="With --search: write the first one to params.yaml.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--picture", type=OutputFile(), help="Draw the memory of each stage to this .svg file."
)
def main(params: Path, **options: Unpack[Options]) -> None:
    """Says what a training run needs of a GPU before one is taken: memory by kind, time of a step.

    With --search all layouts of that many GPUs, the fastest first, and why the others fall out.

    \b
    Reads   params.yaml (model, precision, parallel, training, data, launch,
            runtime, tokenizer)
            data/tokenizer/tokenizer_info.json, where the tokenizer is not trained
    Writes  with --write: parallel, training.micro_batch_size and
            runtime.recompute* of params.yaml
            with --picture: the picture
    """  # noqa: D301  (click wants the character)
    if options["write"] and not options["search"]:
        raise UserError("--write: writes what a search has chosen; give --search too")
    if options["picture"] is not None and options["picture"].suffix != ".svg":
        raise UserError(f"--picture {options['picture']}: is drawn as SVG; name it .svg")
    file = read_params(params)
    sections, runtime = Params.from_file(file), file.section("runtime", RuntimeConfig)
    launch = file.section("launch", LaunchConfig)
    vocab_size = options["vocab_size"] or _vocab_size(file)
    _check(file, sections, vocab_size, lays=not options["search"])
    machines = _machines(options, launch)
    if options["search"]:
        _search(file, (sections, runtime), vocab_size, machines, options)
        return
    per_node = machines.gpus_per_node
    nodes = machines.gpus // per_node
    processes = _processes(file, sections, launch, per_node, nodes)
    works = works_of(sections, runtime, vocab_size, processes)
    fullest = max(works, key=lambda work: peak_memory(work).kinds.total)
    _tell(fullest, _warnings(file, sections, works, machines), machines, options)


def _processes(
    file: ParamsFile, sections: Params, launch: LaunchConfig, per_node: int, nodes: int
) -> int:
    """Of all nodes, whose GPUs are those of the command line."""
    on_gpus = launch.model_copy(update={"device": "cuda"})
    try:
        return process_count(sections, on_gpus, per_node, nodes) * nodes
    except InvalidParams as refusal:
        problems = [
            replace(
                each,
                rule=each.rule.replace("this machine shows", "a node has"),
                remedy=each.remedy.replace(
                    "launch.device: cpu", "give more --gpus or --nodes, or let --search choose"
                ),
            )
            for each in refusal.problems
        ]
        raise InvalidParams(file.located(problems)) from None


def _warnings(
    file: ParamsFile, sections: Params, works: list[Work], machines: Machines
) -> list[str]:
    facts: dict[str, object] = {"works": works, "gpu_memory": machines.memory}
    facts |= {"training": sections.training, "bubble_formula": bubble_formula}
    problems = problems_of(
        (*PLAN_ADVICE, pipeline_waits_little), facts | {"parallel": works[0].parallel}
    )
    warnings = [str(each) for each in file.located(problems)]
    if works[0].ranks < machines.gpus:
        warnings.append(
            f"the run takes {works[0].ranks} of {machines.gpus} GPUs by parallel and the batch: "
            "--search shows layouts of all"
        )
    if works[0].runtime.kernels == "torch":
        warnings.append(
            "runtime.kernels: torch keeps more than the plan says, which is of fused ones"
        )
    return warnings


def _check(file: ParamsFile, sections: Params, vocab_size: int, *, lays: bool) -> None:
    """Refuses parameters that no run could have; the layout counts only where it is planned."""
    known: dict[str, object] = {**vars(sections), "vocab_size": vocab_size}
    if not lays:
        known.pop("parallel")
    if problems := broken_rules(known):
        raise InvalidParams(file.located(problems))


def _vocab_size(file: ParamsFile) -> int:
    try:
        return vocabulary_of(file)
    except UserError as error:
        raise UserError(f"{error}; or give --vocab-size") from None


def _machines(options: Options, launch: LaunchConfig) -> Machines:
    names = cuda_device_names()
    here = options["gpu"] is None and options["ceilings"] is None
    if here and not names:
        raise UserError(
            "this machine shows no GPU: name the kind that the run is to have by --gpu, such as "
            "--gpu H200, or give its rates by --ceilings FILE"
        )
    if options["gpus"] is None and not names:
        raise UserError("this machine shows no GPU: say how many of a node the run has by --gpus")
    rates = _ceilings(options, names)
    gib = options["memory"] or (cuda_memory_bytes() / GIB if here else rates.memory_gib)
    per_node = options["gpus"] or len(names)
    nodes = options["nodes"] or launch.nodes or 1
    return Machines(per_node * nodes, per_node, gib * GIB, rates)


def _ceilings(options: Options, names: tuple[str, ...]) -> Ceilings:
    if options["ceilings"] is not None:
        return read_ceilings(options["ceilings"])
    return known_ceilings(options["gpu"] or names[0])


def _tell(work: Work, warnings: list[str], machines: Machines, options: Options) -> None:
    memories = stage_memories(work)
    time = step_time(work, machines.ceilings, machines.gpus_per_node)
    if options["as_json"]:
        answer = as_mapping(work, memories, time) | {
            "gpu": machines.ceilings.device,
            "gpu_bytes": machines.memory,
            "fits": peak_memory(work).kinds.total <= machines.usable,
            "rates_measured": machines.ceilings.measured,
            "warnings": warnings,
        }
        say(json.dumps(answer, indent=2))
    else:
        table("memory of a rank of each stage, GiB", stage_rows(work, memories), STAGE_HEADERS)
        table("", figure_rows(work, time, peak_memory(work), machines))
        for text in warnings:
            warn(text)
    if options["picture"] is not None:
        title = f"{work.parallel.name}, micro batches {work.micro_batch_size}"
        _draw(options["picture"], as_svg(memories, machines.memory, title), options)


def _draw(path: Path, picture: str, options: Options) -> None:
    write_text_atomically(path, picture)
    if not options["as_json"]:
        say(f"wrote {path}")


def _search(
    file: ParamsFile,
    run: tuple[Params, RuntimeConfig],
    vocab_size: int,
    machines: Machines,
    options: Options,
) -> None:
    found = search(*run, vocab_size, machines)
    title = f"{machines.gpus} x {machines.ceilings.device} of {machines.memory / GIB:.1f} GiB"
    warnings: list[str] = []
    if found.ranked:
        chosen = _with_choice(run[0], found.ranked[0])
        works = works_of(chosen, found.ranked[0].work.runtime, vocab_size, machines.gpus)
        warnings = _warnings(file, chosen, works, machines)
    if options["as_json"]:
        answer = search_mapping(found, machines) | {"warnings": warnings}
        say(json.dumps(answer, indent=2))
    else:
        _tell_found(found, machines, title)
        for text in warnings:
            warn(text)
    if not found.ranked:
        raise UserError(f"no layout of {title} fits; more GPUs, or a smaller model or sequence")
    best = found.ranked[0]
    if options["picture"] is not None:
        memories = stage_memories(best.work)
        picture = as_svg(memories, machines.memory, best.work.parallel.name)
        _draw(options["picture"], picture, options)
    if options["write"]:
        changes = _write(file, best)
        if not options["as_json"]:
            for change in changes:
                say(f"{change.field}: {change.old} -> {change.new}")
            say(f"wrote {file.path} ({len(changes)} keys)")


def _with_choice(params: Params, best: Candidate) -> Params:
    """As ``_write`` leaves them: a phase that has a micro batch of its own keeps it."""
    size = {"micro_batch_size": best.work.micro_batch_size}
    training = params.training.model_copy(update=size)
    return replace(params, parallel=best.work.parallel, training=training)


def _tell_found(found: Found, machines: Machines, title: str) -> None:
    if found.ranked:
        table(f"layouts of {title}", ranked_rows(found, _SHOWN), RANK_HEADERS)
    if len(found.ranked) > _SHOWN:
        say(f"{len(found.ranked) - _SHOWN} more layouts fit: see --json")
    if found.fallen:
        table("what falls out", [(str(n), why) for why, n in found.fallen], ("layouts", "why"))
    say(f"rates: {rates_text(machines)}")


def _write(file: ParamsFile, best: Candidate) -> list[Change]:
    """Sets the keys that a search chooses, in place; those that are as wanted are left alone."""
    parallel, runtime = best.work.parallel.model_dump(), best.work.runtime
    wanted: dict[str, dict[str, object]] = {
        "parallel": parallel,
        "training": {"micro_batch_size": best.work.micro_batch_size},
        "runtime": {"recompute": runtime.recompute},
    }
    if runtime.recompute == "full":
        wanted["runtime"] |= {
            "recompute_method": runtime.recompute_method,
            "recompute_layers": runtime.recompute_layers,
        }
    root = CommentedMap()
    for section, keys in wanted.items():
        root[section] = CommentedMap(
            {key: value for key, value in keys.items() if file.plain(section, key) != value}
        )
    changes = merge_preset(file, ParamsFile(file.path, root))
    write_text_atomically(file.path, to_text(file))
    return changes


if __name__ == "__main__":
    main()
