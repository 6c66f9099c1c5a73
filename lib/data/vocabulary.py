"""The tokens of a tokenizer.json, read as plain JSON.

Without the ``tokenizers`` library, whose import takes longer than checking all parameters.
"""

import json
from pathlib import Path

from lib.errors import UserError


def tokens_by_id(path: Path) -> dict[int, str]:
    """The text of each token id, added tokens included.

    Raises:
        UserError: the file is missing or no tokenizer.json.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["model"]["vocab"]
        # A mapping of tokens to ids; for a unigram model a list of (token, score) in order of ids.
        ids = entries if isinstance(entries, dict) else {e[0]: n for n, e in enumerate(entries)}
        tokens = {int(number): str(token) for token, number in ids.items()}
        return tokens | {int(t["id"]): str(t["content"]) for t in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: cannot be read as a tokenizer.json: {error}") from None


def common_beginning(theirs: Path, ours: Path, count: int) -> int:
    """``count`` where the ids 0 to count - 1 mean the same tokens in both files, else 0.

    An id that has no token must have none in the other file either.

    Raises:
        UserError: a file is missing or no tokenizer.json.
    """
    a, b = tokens_by_id(theirs), tokens_by_id(ours)
    return count if all(a.get(number) == b.get(number) for number in range(count)) else 0
