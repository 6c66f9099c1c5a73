"""Byte-level BPE by ``tiktoken``, for the tokenizers whose ids it gives exactly.

It is about six times as fast as the ``tokenizers`` library. The two differ: ``tokenizers`` merges
neighbours that its list of merges names, the earliest of the list first, and ``tiktoken`` any
neighbours that together are a token, the lowest id first; both take the leftmost of equals. Call a
token proper if the list of merges turns its bytes, alone, into itself. Then

1.  Within a longer word, the bytes of a token x that end up between two borders are merged, as long
    as no merge crosses these borders, as they are in x alone: leaving out other merges does not
    change the order of the rest. So ``tokenizers`` only ever makes proper tokens, and x always by
    the same last merge, the one that ends x alone.
2.  Let ``tiktoken`` know the proper tokens only, and suppose that both have done the same so far.
    If the neighbours c and d are together the proper token x, then by 1. they are a state of x
    alone, whose next merge can only be that of c and d: the list names it. So at every step both
    have the same merges to choose from.
3.  They choose alike if ids of tokens rise with the places of their merges in the list.

Some tokenizers (``ignore_merges``, as Llama 3) first look whether a whole word is a token, which
``tiktoken`` always does. For the others that changes nothing, as a proper token is the encoding of
its own bytes. For these a token that is not proper is given to ``tiktoken`` too; no merge makes it
as long as its bytes alone end as three tokens or more, since 2. then finds no such c and d.

What is left, the cutting of texts into words, is the matter of ``split_pattern``. All this is
checked when a tokenizer is loaded, and the result is compared with the library's on a sample.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken
from tokenizers import Tokenizer
from tokenizers.models import BPE

from lib.data.byte_alphabet import from_byte_alphabet
from lib.data.split_pattern import SplitPattern

# tiktoken looks for control tokens in every text and needs one to look for. It is never allowed,
# so text that spells it is text like any other.
_NEVER_ALLOWED = "<|never allowed|>"
# Tokens of the vocabulary that the sample spells, and what else is in it.
_SAMPLE_TOKENS = 2000
_SAMPLE = (
    "It's WE'LL don't 'Sam \u017ft'\u017f\n\n  x\t y \r\n\r\n   \n\u00a0\u2003 1234567 3.14e-10 =="
    "\u4e16\u754c\u3002\u0434\u043e\u043c e\u0301 \ufb01 \u0661\u0662\u00bd\u216b \U0001f468\u200d "
    "\u1c89\ua7cb\U00010d4a <|endoftext|> \ufeff\u0000\x1c\x85  "
)


class TiktokenEncoding:
    """What ``tokenizers`` does with short texts, done by ``tiktoken``."""

    def __init__(self, ranks: Mapping[bytes, int], split: SplitPattern) -> None:
        """Takes the ids of the tokens, in the order in which they merge, and the pattern."""
        self._encoding = tiktoken.Encoding(
            "drydock",
            pat_str=split.rust,
            mergeable_ranks=dict(ranks),
            special_tokens={_NEVER_ALLOWED: max(ranks.values()) + 1},
        )

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of a text; none of them is that of a control token."""
        return self._encoding.encode_to_numpy(text, disallowed_special=()).view(np.int32)


def exact_tiktoken(
    backend: Tokenizer, content: dict[str, Any], split: SplitPattern
) -> TiktokenEncoding | None:
    """The tokenizer in ``tiktoken``; None where it would not, provably, give the same ids.

    Args:
        backend: the tokenizer, which never takes text for control tokens.
        content: the same as its tokenizer.json.
        split: its pattern.
    """
    ranks = merge_ranks(content)
    if ranks is None:
        return None
    encoding = TiktokenEncoding(ranks, split)
    numbers = sorted(ranks.values())
    sample = _SAMPLE + backend.decode(numbers[:: len(numbers) // _SAMPLE_TOKENS + 1]) + _SAMPLE
    alike = encoding.encode(sample).tolist() == backend.encode(sample, add_special_tokens=False).ids
    return encoding if alike else None


def merge_ranks(content: dict[str, Any]) -> dict[bytes, int] | None:
    """The tokens that ``tiktoken`` may know, with their ids, by the rules above; else None.

    Args:
        content: a tokenizer.json whose pre-tokenizer writes bytes in the byte alphabet.
    """
    model = content["model"]
    if model["type"] != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    whole_words = bool(model.get("ignore_merges"))
    controls = {token["content"] for token in content["added_tokens"]}
    counts = _tokens_of_each(model)
    if not counts:
        return None
    ranks: dict[bytes, int] = {}
    for token, (data, count) in counts.items():
        if token in controls:
            # Merges, or the look for whole words, could turn text into it.
            if count == 1 or whole_words:
                return None
        elif count == 1 or (whole_words and count > 2):
            ranks[data] = model["vocab"][token]
        elif whole_words:
            return None
    return ranks if _ids_rise(model, counts) else None


def _tokens_of_each(model: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
    """Bytes of each token and how many tokens they become by merges alone; empty if one lacks."""
    merging = BPE(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    counts = {
        token: (data, len(merging.tokenize(token)))
        for token in model["vocab"]
        if (data := from_byte_alphabet(token))
    }
    single = {data for data, _ in counts.values() if len(data) == 1}
    return counts if len(single) == 256 else {}


def _ids_rise(model: dict[str, Any], counts: Mapping[str, tuple[bytes, int]]) -> bool:
    """Whether the merges that make proper tokens are listed in the order of the tokens' ids."""
    made = (left + right for left, right in model["merges"])
    ids = [model["vocab"][token] for token in made if counts.get(token, (b"", 0))[1] == 1]
    return all(first <= second for first, second in pairwise(ids))
