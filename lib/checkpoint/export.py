"""The finished model as a folder that Hugging Face's transformers loads.

::

    model_hf/
        model.safetensors       the parameters under their names, without padding rows; above the
                                limit model-00001-of-00003.safetensors ... and
        model.safetensors.index.json            which says what is where
        config.json, generation_config.json
        tokenizer.json, tokenizer_config.json
        README.md               what the model is and was trained by

It appears whole or not at all. The same model gives the same bytes, whatever the layout it was
trained in. A published model is mapped and written file by file, so memory holds one file of its
weights at a time; a checkpoint is read whole.
"""

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lib.atomic import atomic_directory
from lib.checkpoint.export_card import QWEN2_TOKENIZER, card
from lib.checkpoint.export_source import ExportSource, read_export_source
from lib.checkpoint.huggingface import huggingface_shapes, huggingface_tensors
from lib.checkpoint.huggingface_config import config_from_fields
from lib.config.operation import ExportConfig
from lib.console import warn
from lib.data.tokenizer import TOKENIZER_FILE
from lib.errors import UserError

README = "README.md"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_GIGABYTE = 10**9
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|README\.md"
    r"|(generation_|tokenizer_)?config\.json|tokenizer\.json"
)


def export_model(
    model: Path,
    directory: Path,
    options: ExportConfig,
    figures: Mapping[str, object],
    data_tokenizer: Path,
) -> str:
    """Writes the export of a model, or a note where there is to be none.

    Args:
        model: the folder of a published model or of a checkpoint.
        directory: where it goes; an export that is there is replaced, anything else refused.
        options: the section ``export``.
        figures: of the training, for the card: ``loss``, ``validation_loss``; may be empty.
        data_tokenizer: the project's tokenizer, for a checkpoint, which holds none.

    Returns:
        What was written, in a line.

    Raises:
        UserError: the model is damaged or cannot be expressed there, or the folder cannot be
            written; nothing of it is left then.
    """
    _refuse_to_replace(directory)
    try:
        with atomic_directory(directory) as partial:
            if options.format == "none":
                text = "No export: `export.format` in params.yaml is `none`.\n"
                (partial / README).write_text(text, encoding="utf-8")
                return f"{directory} holds a note only, as export.format is none"
            source = read_export_source(model, data_tokenizer)
            return f"{directory} holds {_write(source, partial, options, figures)}"
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the export could not be written to {directory}: {error}; nothing of it is left: "
            "mend the cause and run again"
        ) from error


def _refuse_to_replace(directory: Path) -> None:
    """An export replaces an export, never somebody's other files."""
    if not directory.exists():
        return
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else ["a file"]
    if others := [name for name in names if not _OURS.fullmatch(name)]:
        raise UserError(
            f"{directory}: holds {others[0]}, which is no part of an export, and would be "
            "replaced; name another folder with --output"
        )


def _write(
    source: ExportSource, folder: Path, options: ExportConfig, figures: Mapping[str, object]
) -> str:
    """Writes all files; says what they are."""
    dtype, end = _DTYPES[options.dtype], source.tokenizer.eod_id
    # Documents follow each other in training, so the token that ends one also begins the next.
    ends = {"bos_token_id": end, "eos_token_id": end}
    config = config_from_fields(source.config.model, source.config.data.vocab_size) | ends
    _write_json(folder / "config.json", config | {"torch_dtype": str(dtype).split(".")[1]})
    _write_json(folder / "generation_config.json", ends | {"pad_token_id": end})
    _write_tokenizer(folder, source)
    text = card(source.config, source.origin, options, figures)
    (folder / README).write_text(text, encoding="utf-8")
    if config["model_type"] == "qwen2":
        warn(f"{QWEN2_TOKENIZER} Load it by PreTrainedTokenizerFast, as {README} says.")
    sizes = _write_weights(folder, source, dtype, options.max_shard_gigabytes * _GIGABYTE)
    return (
        f"a {config['model_type']} of {source.config.derived.num_parameters:,} parameters: "
        f"{sum(sizes) / 1e6:,.1f} MB in {options.dtype}, {len(sizes)} "
        f"file{'s' if len(sizes) > 1 else ''} of weights"
    )


def _write_weights(
    folder: Path, source: ExportSource, dtype: torch.dtype, limit: float
) -> list[int]:
    """Writes each file of weights as soon as its last tensor is there; gives their bytes."""
    section, vocab_size = source.config.model, source.config.data.vocab_size
    shapes = huggingface_shapes(section, vocab_size)
    sizes = {name: dtype.itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    shards = plan_shards(sizes, limit)
    tensors = huggingface_tensors(source.tensors, section, vocab_size)
    place: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        contents = {
            name: _converted(name, each, dtype) for name, each in islice(tensors, len(names))
        }
        assert list(contents) == names
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        # The entry that transformers asks for; one alone, since the order of several varies.
        save_file(contents, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        _write_json(folder / "model.safetensors.index.json", index)
    return [sum(sizes[name] for name in names) for names in shards]


def plan_shards(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Cuts tensors into files in the order given.

    Args:
        sizes: bytes of each tensor.
        limit: bytes of a file; a tensor that is larger gets a file of its own.

    Returns:
        The names in each file.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the dtype of the export, every number finite."""
    converted = tensor.to(dtype).contiguous()
    if not torch.isfinite(converted).all():
        if torch.isfinite(tensor).all():
            raise UserError(
                f"export.dtype = {_NAMES[dtype]}: {name} has numbers up to "
                f"{tensor.abs().max():g}, too large for it; write export.dtype: fp32"
            )
        raise UserError(f"{name} has numbers that are not finite: this model's training failed")
    return converted


def _write_tokenizer(folder: Path, source: ExportSource) -> None:
    """The tokenizer such that AutoTokenizer gives the ids that the model was trained on.

    Those are ids of the text alone: no control token is added around it, and text that spells one
    out gets ordinary tokens.
    """
    content = source.tokenizer_json
    content = content | {"post_processor": _adding_nothing(content["post_processor"])}
    # Not sorted: the order of the vocabulary and of the merges is part of the file's meaning.
    text = json.dumps(content, indent=2, ensure_ascii=True) + "\n"
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    end = source.tokenizer.info.end_of_document.token
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        # transformers before 5 adds token_type_ids otherwise, which most models refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": source.config.model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    first_step = content["pre_tokenizer"] or {}
    if "add_prefix_space" in first_step:  # older releases set it to false where it is not given
        settings["add_prefix_space"] = first_step["add_prefix_space"]
    _write_json(folder / "tokenizer_config.json", settings)


def _adding_nothing(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A post-processor without what puts control tokens around a text."""
    if step is None or step["type"] == "ByteLevel":
        return step
    inner = step["processors"] if step["type"] == "Sequence" else []
    kept = [each for each in inner if each["type"] == "ByteLevel"]
    return kept[0] if kept else None


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
