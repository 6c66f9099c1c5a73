"""The Hugging Face model with Drydock's weights: what Drydock is measured by on a CPU.

transformers is a development dependency, imported when a model is built and nowhere else outside
tests: nothing that trains or evaluates needs it.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lib.checkpoint.huggingface import to_huggingface
from lib.config.schema import ModelConfig
from lib.errors import UserError


class HuggingFaceModel(nn.Module):
    """Gives the mean loss of its tokens, as ``PlainModel`` does.

    Args:
        config: the resolved ``model`` section.
        vocab_size: number of real tokens.
        weights: Drydock's, whole, by their global names.

    Raises:
        UserError: transformers is not installed, or has no class for such a model.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        require_transformers()
        import transformers  # noqa: TID251  (for measuring, beside no code that trains)

        state, fields = to_huggingface(weights, config, vocab_size)
        configs: Any = transformers.CONFIG_MAPPING
        models: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        built = configs[fields["model_type"]](**fields)
        self.model: Any = models[type(built)](built)
        self.model.load_state_dict(state, strict=True)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross entropy in nats of int64 tokens and of those that follow them."""
        logits_BSV = self.model(input_ids=tokens_BS, use_cache=False).logits
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def require_transformers() -> None:
    """Refuses where transformers is missing.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError("transformers is not installed; pip install transformers")
