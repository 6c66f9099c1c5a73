"""The weights folder of ``lib.config.initial_weights``: written by an import, read at a start."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib.atomic import atomic_directory, sha256_of
from lib.checkpoint.shapes import parameter_shapes
from lib.config.initial_weights import (
    IMPORT,
    WEIGHTS_FILE,
    WEIGHTS_RECORD,
    WEIGHTS_TOKENIZER,
    FileFacts,
    WeightsRecord,
    first_new_row,
)
from lib.config.project import original_path
from lib.config.run_config import InitialWeights, RunConfig
from lib.config.schema import ModelConfig
from lib.errors import UserError

_AGAIN = f"import the weights again ({IMPORT}), or set training.initial_weights: null"


def write_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    source: str,
    *,
    tokenizer: Path | None,
    tokenizer_fingerprint: str | None,
) -> WeightsRecord:
    """Writes a weights folder, whole or not at all; the same input gives the same bytes.

    Args:
        directory: where it goes; weights that are there are replaced, anything else refused.
        tensors: every parameter of ``model``, fp32 on the CPU, without padding rows.
        model: the resolved model section.
        source: where the weights come from, for a reader.
        tokenizer: the tokenizer.json to copy.
        tokenizer_fingerprint: of the tokenizer that numbered the tokens, if it is known.

    Raises:
        UserError: something else is there, or it cannot be written; nothing new is left then.
    """
    if directory.exists() and not (directory / WEIGHTS_RECORD).is_file():
        raise UserError(f"{directory}: is there and no weights folder; give another --output")
    vocab_size = tensors["embedding.word_embeddings.weight"].shape[0]
    shapes = parameter_shapes(model, vocab_size)
    assert {name: tuple(each.shape) for name, each in tensors.items()} == shapes
    assert all(each.dtype == torch.float32 for each in tensors.values())
    try:
        with atomic_directory(directory) as partial:
            contents = {name: tensors[name].contiguous() for name in shapes}
            save_file(contents, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            if tokenizer is not None:
                shutil.copyfile(tokenizer, partial / WEIGHTS_TOKENIZER)
            record = WeightsRecord(
                model=model,
                vocab_size=vocab_size,
                tokenizer_fingerprint=tokenizer_fingerprint,
                source=source,
                files={
                    file.name: FileFacts(bytes=file.stat().st_size, sha256=sha256_of(file))
                    for file in sorted(partial.iterdir())
                },
            )
            text = json.dumps(record.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
            (partial / WEIGHTS_RECORD).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory} could not be written: {error}; nothing of it is left") from (
            error
        )
    return record


class StoredWeights:
    """The weights that a run starts from, read tensor by tensor.

    Raises:
        UserError: the folder is missing or damaged, holds other weights than the run
            configuration was made for, or not the tensors that it says.
    """

    def __init__(self, config: RunConfig) -> None:
        initial = config.initial
        assert initial.folder is not None
        self._path = original_path(initial.folder) / WEIGHTS_FILE
        self._new_parts = initial.new_parts
        self._shapes = parameter_shapes(config.model, config.data.vocab_size)
        _require_those(self._path, initial)
        try:
            # Mapped into memory: ranks of one machine share the pages.
            self._file = safe_open(self._path, framework="pt")
            self._names = set(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._path}: cannot be read ({error}); {_AGAIN}") from error
        for name in self._shapes:
            self.rows(name)  # only looks: a tensor that nobody uses is not read

    def rows(self, name: str) -> Tensor | None:
        """The first rows of a parameter, as far as they are given; None where all of it is new.

        Args:
            name: its global name.

        Returns:
            fp32 on the CPU: all rows but padding, or those that are not among the new parts.
        """
        first_new = first_new_row(name, self._new_parts)
        if first_new == 0:
            return None
        value = self._file.get_tensor(name) if name in self._names else torch.empty(0)
        wanted = self._shapes[name]
        if first_new is not None:
            value, wanted = value[:first_new], (first_new, *wanted[1:])
        if tuple(value.shape) != wanted or value.dtype != torch.float32:
            held = (
                f"{tuple(value.shape)} {value.dtype}" if name in self._names else "no such tensor"
            )
            raise UserError(f"{self._path}: {name}: {held} instead of fp32 {wanted}; {_AGAIN}")
        return value


def _require_those(path: Path, initial: InitialWeights) -> None:
    """Refuses a folder whose weights are not the ones that the configuration was made for."""
    record = WeightsRecord.load(path.parent)
    for what, found in (
        (f"{WEIGHTS_RECORD} says", record.files[WEIGHTS_FILE].sha256),
        (f"{WEIGHTS_FILE} has", sha256_of(path)),
    ):
        if found != initial.sha256:
            raise UserError(
                f"{path.parent}: {what} sha256 {found}, but this run starts from "
                f"{initial.sha256}; put those weights back, or name the present ones in "
                f"training.initial_weights: {initial.folder}@{found[:16]}"
            )
