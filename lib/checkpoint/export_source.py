"""What an export is made of: a published model, or a checkpoint of a run and its tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lib.checkpoint import directory as folders
from lib.checkpoint.as_model import is_checkpoint, read_checkpoint_model
from lib.checkpoint.json_object import read_json_object
from lib.checkpoint.published import RUN_CONFIG, RUN_RECORD, read_model
from lib.config.run_config import RunConfig
from lib.data.tokenizer import TOKENIZER_FILE, TextTokenizer, load_tokenizer
from lib.errors import UserError


@dataclass(frozen=True)
class Origin:
    """How the weights came to be, for the card.

    Attributes:
        fingerprint: of the run.
        tokens: that it saw.
        git_commit: of the project, in words.
    """

    fingerprint: str
    tokens: int
    git_commit: str


@dataclass(frozen=True)
class ExportSource:
    """A model with all that belongs to it.

    Attributes:
        config: what it was trained by.
        tensors: its parameters, fp32 on the CPU, without padding rows; those of a published model
            are mapped, not read.
        tokenizer: its tokenizer.
        tokenizer_json: the contents of its tokenizer.json.
        origin: how it came to be.
    """

    config: RunConfig
    tensors: Mapping[str, Tensor]
    tokenizer: TextTokenizer
    tokenizer_json: dict[str, Any]
    origin: Origin


def read_export_source(folder: Path, data_tokenizer: Path) -> ExportSource:
    """Reads a published model or a checkpoint.

    Args:
        folder: ``model/`` or ``state/FINGERPRINT/iter_N``.
        data_tokenizer: the project's tokenizer, for a checkpoint, which holds none.

    Raises:
        UserError: it is neither, a file is damaged, or model and tokenizer do not belong together.
    """
    if is_checkpoint(folder):
        found = read_checkpoint_model(folder)
        config, tensors = found.config, found.tensors
        tokens, commit = found.scalars["tokens_seen"], found.scalars["git_commit"]
        assert isinstance(tokens, int)
        origin = Origin(folder.resolve().parent.name, tokens, str(commit or "unknown"))
        tokenizer_folder = data_tokenizer
    elif (folder / RUN_CONFIG).is_file():
        config, tensors, origin = _read_published(folder)
        tokenizer_folder = folder
    else:
        raise UserError(
            f"{folder}: holds no {RUN_CONFIG} (a published model) and no {folders.MANIFEST} (a "
            "checkpoint, state/FINGERPRINT/iter_N); name one of the two with --model"
        )
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.fingerprint != config.data.tokenizer_fingerprint:
        raise UserError(
            f"{tokenizer_folder / TOKENIZER_FILE}: is not the tokenizer that the model of {folder} "
            "was trained with; bring that one back (dvc checkout, or dvc repro prepare_tokenizer)"
        )
    content = read_json_object(tokenizer_folder / TOKENIZER_FILE, "publish the model again")
    return ExportSource(config, tensors, tokenizer, content, origin)


def _read_published(folder: Path) -> tuple[RunConfig, dict[str, Tensor], Origin]:
    config, tensors = read_model(folder)
    record = read_json_object(folder / RUN_RECORD, "publish the model again")
    commit, git = "unknown", record.get("git")
    if git is not None:
        commit = git["commit"] + (", with uncommitted changes" if git["dirty"] else "")
    origin = Origin(str(record.get("fingerprint")), config.derived.train_tokens, commit)
    return config, tensors, origin
