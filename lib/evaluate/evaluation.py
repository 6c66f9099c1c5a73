"""Evaluates a published model: loss on held-out text and generated samples.

No process group: one process reads ``model/`` and the tokenised corpus.
"""

import csv
import functools
import io
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.checkpoint.published import read_model
from lib.checkpoint.run_data import open_samples, require_tokens
from lib.config.operation import EvaluateConfig
from lib.config.run_config import RunConfig
from lib.data.samples import SampleWindows
from lib.data.tokenizer import TextTokenizer, load_tokenizer, token_byte_lengths
from lib.errors import UserError
from lib.evaluate.generate import Sampling, continue_prompt, parses_as_python
from lib.evaluate.perplexity import HeldOutLoss, Measuring, measure_loss
from lib.layers.attention import attention_backend
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.loss import SampleRules
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import named_parts


@dataclass(frozen=True)
class Text:
    """A generated text.

    Attributes:
        prompt: its beginning, as given.
        continuation: what the model made of it.
        ended: whether the text ended by itself, rather than at the limit.
    """

    prompt: str
    continuation: str
    ended: bool


@dataclass(frozen=True)
class Evaluated:
    """A published model, ready to be asked.

    Attributes:
        config: what it was trained by.
        tokenizer: its tokenizer.
        model: in evaluation mode, on the device.
    """

    config: RunConfig
    tokenizer: TextTokenizer
    model: GPTModel


def load_model(folder: Path) -> Evaluated:
    """Reads ``model/`` and puts it on a GPU if there is one, in the dtype it was trained in."""
    config, tensors = read_model(folder)
    model = GPTModel(
        config.model,
        vocab_size=config.data.vocab_size,
        padded_vocab_size=config.derived.padded_vocab_size,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("auto")),
        part=whole_model(config.model),
    )
    for name, part in named_parts(model):
        value = tensors[name]
        part.value.zero_()[: value.shape[0]] = value  # padding rows are not published
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device, COMPUTE_DTYPES[config.precision.compute]).eval()
    return Evaluated(config, load_tokenizer(folder), model)


@dataclass(frozen=True)
class HeldOutSet:
    """What is measured of one corpus.

    Attributes:
        name: of the corpus.
        windows: samples of its split, or of the whole corpus if none of it was trained on.
        num_samples: how many of them to measure.
    """

    name: str
    windows: SampleWindows
    num_samples: int


def open_sets(evaluated: Evaluated, options: EvaluateConfig) -> list[HeldOutSet]:
    """What to measure: the corpora whose loss training measured, on the split that is asked for.

    Raises:
        UserError: these are not the tokens of the model, or a split holds less than one sample.
    """
    config, length = evaluated.config, evaluated.config.training.seq_length
    names = config.data.validation
    # Other tokens may hold what the model was trained on, or number words in another way.
    remedy = "run the pipeline again (dvc repro), or name the model of these tokens with --model"
    require_tokens(config.data, names, "this model", remedy)
    sets = []
    for name in names:
        windows = open_samples(config, name, options.split, length)
        wanted = windows.num_samples
        if wanted < 1:
            tokens = config.data.corpora[name].splits[options.split].tokens
            raise UserError(
                f"evaluate.split = {options.split}: {name} has {tokens} tokens for it, fewer than "
                f"one sample of {length + 1}; give it a larger share in training.split"
            )
        if options.max_tokens is not None:
            wanted = max(1, min(wanted, options.max_tokens // length))
        sets.append(HeldOutSet(name, windows, wanted))
    return sets


def held_out_losses(
    evaluated: Evaluated, sets: Sequence[HeldOutSet], advance: Callable[[int], None]
) -> dict[str, HeldOutLoss]:
    """The loss of each set by name; ``advance`` is told the number of finished samples."""
    byte_lengths = token_byte_lengths(evaluated.tokenizer)
    batch_size = evaluated.config.training.micro_batch_size
    return {
        each.name: measure_loss(
            evaluated.model,
            each.windows,
            byte_lengths,
            Measuring(batch_size, each.num_samples, SampleRules.of(evaluated.config.data)),
            advance,
        )
        for each in sets
    }


def added_up(losses: Mapping[str, HeldOutLoss]) -> HeldOutLoss:
    """All sets together, per token."""
    return functools.reduce(operator.add, losses.values())


def generate_texts(
    evaluated: Evaluated, options: EvaluateConfig, advance: Callable[[int], None]
) -> list[Text]:
    """Continues the prompts in turn; without prompts, texts begin as documents do."""
    tokenizer = evaluated.tokenizer
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        max_context=evaluated.config.longest_seq_length,
        eod_id=tokenizer.eod_id,
        rules=SampleRules.of(evaluated.config.data),
    )
    prompts = options.prompts or ("",)
    texts: dict[int, Text] = {}
    for index, prompt in enumerate(prompts):
        numbers = range(index, options.num_samples, len(prompts))
        if not numbers:
            continue
        # A document follows the end of another one: that is how the model saw beginnings.
        ids = [tokenizer.eod_id, *tokenizer.encode(prompt)]
        continuations = continue_prompt(evaluated.model, ids, numbers, sampling, advance)
        for number, continuation in zip(numbers, continuations, strict=True):
            text = decode_after(tokenizer, ids, continuation.tokens)
            texts[number] = Text(prompt, text, ended=continuation.ended)
    return [texts[number] for number in sorted(texts)]


def decode_after(tokenizer: TextTokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens that follow others.

    SentencePiece-like tokenizers drop the space before a text, so tokens decoded alone would lose
    the space between them and the prompt. They are decoded together and the prompt is cut off.
    """
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *tokens])
    if whole.startswith(before):
        return whole[len(before) :]
    # Bytes that form no character also spoil the bytes right before them, the prompt's last ones.
    # Such tokens begin with a byte, so no space is lost.
    return tokenizer.decode(tokens)


def syntax_share(texts: list[Text]) -> float:
    """Share of texts that are valid Python, up to the line at which they were cut off if any."""
    parse = [parses_as_python(text.prompt + text.continuation, ended=text.ended) for text in texts]
    return sum(parse) / len(texts)


def metrics(
    evaluated: Evaluated,
    losses: Mapping[str, HeldOutLoss],
    texts: list[Text],
    options: EvaluateConfig,
) -> dict[str, object]:
    """The flat figures of ``results/evaluate.json``: of all sets, then of each of several."""
    loss = added_up(losses)
    figures: dict[str, object] = {
        "split": options.split,
        "loss": loss.loss,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
        "unigram_entropy": loss.unigram_entropy,
        "tokens": loss.tokens,
        "text_bytes": loss.text_bytes,
        "parameters": evaluated.config.derived.num_parameters,
        "samples": len(texts),
    }
    if len(losses) > 1:
        for name, each in losses.items():
            figures[f"loss/{name}"] = each.loss
            figures[f"bits_per_byte/{name}"] = each.bits_per_byte
    if options.syntax is not None and texts:
        figures["syntax_share"] = syntax_share(texts)
    return figures


def loss_by_position_csv(loss: HeldOutLoss) -> str:
    """Mean loss at each position of the window at which a label counts, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("position", "loss"))
    rows = zip(loss.loss_sums.tolist(), loss.counts.tolist(), strict=True)
    for position, (total, count) in enumerate(rows, start=1):
        if count > 0:
            writer.writerow((position, f"{total / count:.6f}"))
    return text.getvalue()


def samples_markdown(texts: list[Text], figures: dict[str, object]) -> str:
    """The generated texts as a page: the prompt in bold above each."""
    lines = ["# Generated samples", ""]
    if "syntax_share" in figures:
        lines += [f"{figures['syntax_share']:.0%} of {len(texts)} parse as Python.", ""]
    for number, text in enumerate(texts, start=1):
        prompt = repr(text.prompt) if text.prompt else "the beginning of a document"
        body = text.prompt + text.continuation
        lines += [f"## {number}: after {prompt}", "", "~~~~", body, "~~~~", ""]
    return "\n".join(lines)
