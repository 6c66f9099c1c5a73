"""A launch of Megatron-LM as parameters of this project: what is written, and what is not."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from lib.config.params_problems import nearest_keys
from lib.errors import Problem
from lib.plan.megatron_data import import_data
from lib.plan.megatron_flag_table import RENAMED
from lib.plan.megatron_flags import (
    Arguments,
    Importing,
    Setting,
    Without,
    reason_without,
    show_flag,
)
from lib.plan.megatron_layout import import_layout
from lib.plan.megatron_lengths import import_lengths
from lib.plan.megatron_model import import_model
from lib.plan.megatron_script import Flag, read_launch
from lib.plan.shell_script import Source

_OTHER_MODELS = ("bert", "t5", "vit", "vision", "ict", "biencoder", "retro", "multimodal", "vlm")
_NEEDED = {
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "optimizer.lr",
    "training.seq_length",
    "training.micro_batch_size",
    "training.global_batch_size",
    "training.train_iters",
}


@dataclass(frozen=True)
class Import:
    """What becomes of a launch.

    Attributes:
        flags: all flags, as written.
        settings: what is written, by field.
        agreed: flags (as written) that say what is so here anyway, with a word.
        renamed: flags (as written) that Megatron no longer has, with its modern name.
        without: flags without a counterpart here.
        unknown: flags that no Megatron known here has, with near names.
        unknown_values: flags whose value the script does not say.
        notes: what a person should know.
        problems: sums that do not add up.
        is_complete: whether the flags give all that a run needs, and do not contradict each other.
    """

    flags: tuple[str, ...]
    settings: Mapping[str, Setting]
    agreed: Mapping[str, str]
    renamed: Mapping[str, str]
    without: tuple[Without, ...]
    unknown: Mapping[str, tuple[str, ...]]
    unknown_values: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    is_complete: bool

    @property
    def mapped(self) -> list[Setting]:
        """Settings that come from a flag."""
        return [each for each in self.settings.values() if each.flags]

    @property
    def defaults(self) -> list[Setting]:
        """Settings that no flag says."""
        return [each for each in self.settings.values() if not each.flags]


def import_launch(
    text: str,
    variables: Mapping[str, str],
    taken: Collection[str],
    source: Source = lambda _name: None,
) -> Import:
    """Reads a launch script, or the flags alone.

    Args:
        text: the script.
        variables: the environment of the script; positional parameters are "1", "2", ...
        taken: the names in the section corpora, which no imported pair may have.
        source: gives the files that the script reads in with ``source``.

    Raises:
        UserError: the text cannot be read as a script, or has no flags.
    """
    launch = read_launch(text, variables, source)
    arguments = Arguments(launch.flags)
    importing = Importing(arguments, launch)
    import_model(importing)
    copies = import_layout(importing)
    import_lengths(importing, copies)
    import_data(importing, taken)
    program = PurePosixPath(launch.program or "").name.lower()
    if any(kind in program for kind in _OTHER_MODELS):
        importing.notes.append(f"{program}: only decoders of text are here, as pretrain_gpt.py has")
    arguments.finish()
    without, unknown = _unread(importing)
    settings = {each.field: each for each in importing.settings}
    return Import(
        flags=tuple(map(show_flag, launch.flags)),
        settings=settings,
        agreed={show_flag(arguments.given[name]): word for name, word in importing.agreed.items()},
        renamed=_renamed(launch.flags),
        without=(*importing.without, *without),
        unknown=unknown,
        unknown_values=tuple(dict.fromkeys(arguments.unknown_values)),
        notes=(*launch.notes, *importing.notes),
        problems=(*arguments.problems, *importing.problems),
        is_complete=settings.keys() >= _NEEDED and not (arguments.problems or importing.problems),
    )


def _renamed(flags: Collection[Flag]) -> dict[str, str]:
    return {show_flag(flag): RENAMED[flag.name] for flag in flags if flag.name in RENAMED}


def _unread(importing: Importing) -> tuple[list[Without], dict[str, tuple[str, ...]]]:
    """Flags that no module read: those that are known, and those that are not."""
    without: list[Without] = []
    unknown: dict[str, tuple[str, ...]] = {}
    arguments = importing.arguments
    for name, flag in arguments.given.items():
        if name in arguments.read:
            continue  # and so in the settings, in what is agreed or in what is left out
        reason = reason_without(flag.name)
        if reason is not None:
            without.append(Without(show_flag(flag), *reason))
        elif flag.name not in RENAMED:
            near = nearest_keys(name, (known.replace("-", "_") for known in arguments.asked))
            unknown[show_flag(flag)] = tuple(f"--{each.replace('_', '-')}" for each in near)
    return without, unknown
