"""A sample as the model sees it, token by token, under the section ``data``.

Written with numpy and apart from ``lib.model.loss``, which makes the same of a micro batch: so the
one can be held against the other, and looking at data needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lib.config.data_facts import DataFacts
from lib.data.samples import SampleWindows
from lib.data.tokenizer import TextTokenizer

_NO_TEXT = "\ufffd"  # what decoding makes of bytes that are no character
_METASPACE = "\u2581"


@dataclass(frozen=True)
class SampleView:
    """The S inputs of a sample and their labels.

    Attributes:
        tokens: inputs, int64 [S].
        labels: the token after each, int64 [S].
        counts: whether the label counts in the loss, bool [S].
        positions: what the model takes for the place of each token, int64 [S].
        sees_from: the first place that each token attends to, int64 [S]; the last is its own.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    counts: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    sees_from: npt.NDArray[np.int64]

    @classmethod
    def of(cls, windows: SampleWindows, sample: int, data: DataFacts) -> "SampleView":
        """The view of one sample under the rules of a run.

        Raises:
            IndexError: there is no such sample.
        """
        window, starts = windows.window(sample), windows.starts(sample)
        place = np.arange(windows.seq_length, dtype=np.int64)
        edges = np.append(0, starts)  # places at which a document, or the rest of one, begins
        begin = edges[np.searchsorted(edges, place, side="right") - 1]
        labels = window[1:]
        return cls(
            tokens=window[:-1],
            labels=labels,
            counts=(labels != data.eod_id) | data.eod_in_loss,
            positions=place - begin if data.positions == "document" else place,
            sees_from=begin if data.attention == "document" else np.zeros_like(place),
        )

    def rows(self, tokenizer: TextTokenizer) -> Iterator[dict[str, object]]:
        """Each input as a row: place, position, sees_from, token, text, label, counts."""
        for place in range(self.tokens.size):
            token = int(self.tokens[place])
            yield {
                "place": place,
                "position": int(self.positions[place]),
                "sees_from": int(self.sees_from[place]),
                "token": token,
                "text": token_text(tokenizer, token),
                "label": int(self.labels[place]),
                "counts": bool(self.counts[place]),
            }


def token_text(tokenizer: TextTokenizer, token: int) -> str:
    """What a token alone stands for; its spelling in the vocabulary where that is no whole text."""
    spelling = tokenizer.backend.id_to_token(token) or ""
    if _METASPACE in spelling:  # decoding drops the space before the first word
        return spelling.replace(_METASPACE, " ")
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    return spelling if _NO_TEXT in text else text
