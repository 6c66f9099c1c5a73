"""The card of an exported model: README.md, as Hugging Face shows it on a model's page."""

from collections.abc import Mapping

from lib.checkpoint.export_source import Origin
from lib.config.data_facts import DataFacts
from lib.config.export_rules import TITLES, Family, family_of
from lib.config.operation import ExportConfig
from lib.config.run_config import RunConfig

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
---

"""
_USE = """
```python
from transformers import AutoModelForCausalLM, {tokenizer}

tokenizer = {tokenizer}.from_pretrained("THIS_FOLDER")
model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
```
{remark}
The tokenizer adds no control tokens to a text, and text that spells one out gets ordinary tokens,
as in training. In training each document followed the end of another: a text that is to begin as
a document begins with `tokenizer.bos_token_id`, which is also the token that ends one.
"""
QWEN2_TOKENIZER = (
    "AutoTokenizer of transformers 5 splits text by Qwen's own rules in any qwen2 folder, whatever "
    "its tokenizer.json says."
)


def card(
    config: RunConfig,
    origin: Origin,
    options: ExportConfig,
    figures: Mapping[str, object],
) -> str:
    """What the model is and was trained by, in Markdown.

    Args:
        config: the run configuration.
        origin: how the weights came to be.
        options: how it was exported.
        figures: of the training: ``loss``, ``validation_loss``; may be empty.
    """
    model, derived, family = config.model, config.derived, family_of(config.model)
    title = f"{TITLES[family]} of {derived.num_parameters:,} parameters"
    rows = [
        ("layers", str(model.num_layers)),
        ("width", f"{model.hidden_size}, {model.num_attention_heads} heads of {model.head_dim}"),
        ("vocabulary", f"{config.data.vocab_size:,} tokens"),
        ("longest text", f"{model.max_position_embeddings:,} tokens"),
        ("trained on", f"{origin.tokens:,} tokens in {config.precision.compute}"),
        *_losses(figures),
        ("these weights", options.dtype),
        ("run", origin.fingerprint),
        *_corpora(config.data),
        ("git commit", origin.git_commit),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return f"{_HEAD}# {title}\n\nTrained by Drydock.\n\n| | |\n|---|---|\n{table}{_use(family)}"


def _use(family: Family) -> str:
    if family == "qwen2":
        return _USE.format(tokenizer="PreTrainedTokenizerFast", remark=f"\n{QWEN2_TOKENIZER}\n")
    return _USE.format(tokenizer="AutoTokenizer", remark="")


def _corpora(data: DataFacts) -> list[tuple[str, str]]:
    return [
        (f"tokens of {name}", f"sha256 {data.corpora[name].tokens_sha256}") for name in data.trained
    ]


def _losses(figures: Mapping[str, object]) -> list[tuple[str, str]]:
    named = {"loss": "training loss, last step", "validation_loss": "validation loss"}
    return [
        (title, f"{value:.4f} nats per token")
        for name, title in named.items()
        if isinstance(value := figures.get(name), float)
    ]
