"""Command: writes a launch script of Megatron-LM as parameters of this project."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten

import click
from ruamel.yaml.comments import CommentedMap

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.export_rules import hugging_face_can_express_the_model
from lib.config.operation import CONFIG_SECTIONS, ExportConfig
from lib.config.params_file import (
    ParamsFile,
    Plain,
    check_params_sections,
    in_file_order,
    parse_params,
    read_params,
)
from lib.config.presets import merge_preset, to_text
from lib.config.rules import broken_rules
from lib.config.schema import ModelSection, TrainingSection
from lib.console import say
from lib.data.options import DATA_SECTIONS, Corpora, TokenizerOptions
from lib.errors import Problem, UserError
from lib.plan.megatron_flags import Setting
from lib.plan.megatron_import import Import, import_launch

_WIDEST = 80
ALL_SECTIONS = DATA_SECTIONS | CONFIG_SECTIONS


@dataclass(frozen=True)
class Written:
    """Parameters with an import in them: their text, what was there before, and what is wrong."""

    text: str
    before: dict[str, Plain]
    notes: list[str]
    problems: list[Problem]


@stage_command
@click.argument("script")
@click.option("--output", type=click.Path(path_type=Path), help="Write the parameters here.")
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if there is one.")
@click.option(
    "--set",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the script's environment; 1=VALUE is its first argument. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
def main(
    params: Path,
    script: str,
    output: Path | None,
    overwrite: bool,
    given: tuple[str, ...],
    as_json: bool,
) -> None:
    """Reads SCRIPT, a launch script of Megatron-LM ("-": standard input), and writes the same run.

    A command line or flags alone do as well. Nothing is executed: variables, arrays, functions,
    conditions and loops are followed by reading, and so are files beside SCRIPT that it sources.
    The parameters are those of --params with every key set that Megatron has a flag or a default
    for; comments stay.

    Lists which flags became which keys, which keys are set to defaults of Megatron, which flags
    Megatron itself no longer has, which have no counterpart here and why, and which are unknown.

    Without --output the parameters go to standard output, the lists before them as comments.
    Sums that do not add up (processes, batches, lengths) are named, nothing is written, and the
    exit status is 1. Unknown flags, and those without a counterpart, are no error.

    \b
    Reads   SCRIPT, files that it sources, params.yaml
    Writes  the file of --output
    """  # noqa: D301  (click wants the character, not the two that r"..." would give)
    if output is not None and output.exists() and not overwrite:
        raise UserError(f"{output} is there already: give another name, or --overwrite")
    try:
        params_file = read_params(params)
        corpora = params_file.plain("corpora")
        taken = list(corpora) if isinstance(corpora, dict) else []
        found = import_launch(
            read_script(script),
            read_variables(given),
            taken,
            source=lambda name: beside(script, name),
        )
        written = write_import(params_file, found)
    except UserError as error:
        if not as_json:
            raise
        say(json.dumps({"ok": False, "error": str(error)}, indent=2))
        raise SystemExit(1) from None
    if as_json:
        say(json.dumps(as_plain(found, written), indent=2))
        if written.problems:
            raise SystemExit(1)
    else:
        tell(found, written, alone=output is not None)
    if output is not None:
        write_text_atomically(output, written.text)
        if not as_json:
            say(f"wrote {output}; check it: python -m stages.validate_config --params {output}")


def tell(found: Import, written: Written, *, alone: bool) -> None:
    """Says the lists, and below them the parameters unless they get a file of their own.

    Raises:
        UserError: sums do not add up.
    """
    as_comment = not alone and not written.problems
    for line in report(found, written):
        say(f"# {line}".rstrip() if as_comment else line)
    if written.problems:
        listed = "\n".join(f"  {problem}" for problem in written.problems)
        raise UserError(f"the run does not add up, so nothing is written:\n{listed}")
    if as_comment:
        say(written.text.rstrip("\n"))


def read_script(script: str) -> str:
    """The text of a file, or of standard input.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if script == "-":
            return sys.stdin.read()
        return Path(script).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{script}: no such file; give a launch script, or - for input") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{script}: cannot be read as text ({error})") from None


def beside(script: str, name: str) -> str | None:
    """The text of a file that a script reads in, by its name beside the script; None: not there."""
    path = Path(script).parent / Path(name).name
    try:
        return path.read_text(encoding="utf-8-sig") if script != "-" and path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def read_variables(given: tuple[str, ...]) -> dict[str, str]:
    """The variables of ``--set``.

    Raises:
        UserError: one has no ``=``.
    """
    for each in given:
        if "=" not in each:
            raise UserError(f"--set {each}: write NAME=VALUE")
    return {name: value for name, _, value in (each.partition("=") for each in given)}


def write_import(params_file: ParamsFile, found: Import) -> Written:
    """Puts an import into parameters, in place, and checks all that needs no data."""
    before = {field: params_file.plain(*field.split(".")) for field in found.settings}
    root = CommentedMap()
    for setting in found.settings.values():
        if before[setting.field] == setting.value:
            continue  # its spelling stays
        section, _, key = setting.field.partition(".")
        if section not in root:
            root[section] = CommentedMap()
        root[section][key] = setting.value
    merge_preset(params_file, ParamsFile(params_file.path, root))
    notes: list[str] = []
    if found.is_complete and not can_export(params_file):
        params_file.root["export"]["format"] = "none"
        notes.append("export.format: none, since transformers has no class for this model")
    problems = find_problems(params_file, is_complete=found.is_complete)
    return Written(to_text(params_file), before, notes, [*found.problems, *problems])


def can_export(params_file: ParamsFile) -> bool:
    """Whether the model can be exported as the section ``export`` says."""
    sections, _problems = check_params_sections(parsed_again(params_file), ALL_SECTIONS)
    export, model, training = (sections.get(name) for name in ("export", "model", "training"))
    if not isinstance(export, ExportConfig) or not isinstance(model, ModelSection):
        return True
    if not isinstance(training, TrainingSection):
        return True
    return not list(hugging_face_can_express_the_model(export, model, training))


def parsed_again(params_file: ParamsFile) -> ParamsFile:
    """The file as a reader of its text would see it."""
    return parse_params(to_text(params_file), params_file.path)


def find_problems(params_file: ParamsFile, *, is_complete: bool) -> list[Problem]:
    """Broken rules; only those of single keys where the flags do not give all that a run needs."""
    sections, problems = check_params_sections(parsed_again(params_file), ALL_SECTIONS)
    known: dict[str, object] = dict(sections)
    if isinstance(corpora := sections.get("corpora"), Corpora):
        known["corpora"] = tuple(corpora.root)
    tokenizer = sections.get("tokenizer")
    if isinstance(tokenizer, TokenizerOptions) and tokenizer.kind == "train_bpe":
        known["vocab_size"] = tokenizer.vocab_size
    found_here = [replace(each, where="") for each in in_file_order(problems)]
    return [*found_here, *(broken_rules(known) if is_complete else [])]


# ---- what is said


def report(found: Import, written: Written) -> list[str]:
    """The lists, as lines."""
    lines = [f"{len(found.flags)} flags"]
    lines += _part("mapped", [_mapped(setting) for setting in _by_section(found.mapped)])
    lines += _part(
        "say what is so here in any case",
        [f"{flag}: {word}" for flag, word in found.agreed.items()],
    )
    lines += _part(
        "set although no flag says it",
        [
            _default(each, written)
            for each in _by_section(found.defaults)
            if _differs(each, written)
        ],
    )
    lines += _part(
        "flags that Megatron no longer has",
        [f"{flag}: now {modern}" for flag, modern in found.renamed.items()],
    )
    for changes, title in (
        (True, "without a counterpart, and the run is ANOTHER ONE without them"),
        (False, "without a counterpart, and the result does not depend on them"),
    ):
        wanted = [each for each in found.without if each.changes_result == changes]
        lines += _part(title, [f"{each.flag}: {each.why}" for each in wanted])
    lines += _part("unknown flags", [_unknown(*each) for each in found.unknown.items()])
    lines += _part(
        "to fill in: the script does not say it (a variable: --set NAME=VALUE)",
        found.unknown_values,
    )
    return lines + _part("to know", [*found.notes, *written.notes])


def _by_section(settings: list[Setting]) -> list[Setting]:
    """In the order of the sections of params.yaml."""
    order = list(ALL_SECTIONS)
    return sorted(settings, key=lambda each: order.index(each.field.partition(".")[0]))


def _part(title: str, entries: list[str] | tuple[str, ...]) -> list[str]:
    if not entries:
        return []
    return ["", f"{title} ({len(entries)}):", *(f"  {entry}" for entry in entries)]


def _mapped(setting: Setting) -> str:
    why = f"  ({setting.why})" if setting.why else ""
    flags = shorten(", ".join(setting.flags), _WIDEST, placeholder=" ...")
    return f"{flags} -> {setting.field}: {_show(setting.value)}{why}"


def _default(setting: Setting, written: Written) -> str:
    old = _show(written.before[setting.field])
    return f"{setting.field}: {_show(setting.value)}, was {old}  ({setting.why or 'no flag'})"


def _differs(setting: Setting, written: Written) -> bool:
    return written.before[setting.field] != setting.value


def _unknown(flag: str, near: tuple[str, ...]) -> str:
    return f"{flag}: did you mean {near[0]}?" if near else flag


def _show(value: object) -> str:
    return json.dumps(value)


def as_plain(found: Import, written: Written) -> dict[str, object]:
    """All of it for ``--json``."""
    return {
        "ok": not written.problems,
        "flags": list(found.flags),
        "mapped": [asdict(setting) for setting in found.mapped],
        "agreed": dict(found.agreed),
        "defaults": [
            {**asdict(setting), "was": written.before[setting.field]}
            for setting in found.defaults
            if _differs(setting, written)
        ],
        "renamed": dict(found.renamed),
        "without_counterpart": [asdict(each) for each in found.without],
        "unknown": {flag: list(near) for flag, near in found.unknown.items()},
        "unknown_values": list(found.unknown_values),
        "notes": [*found.notes, *written.notes],
        "problems": [asdict(problem) for problem in written.problems],
        "params": written.text,
    }


if __name__ == "__main__":
    main()
