"""Reading a file that holds one JSON object."""

import json
from pathlib import Path
from typing import Any

from lib.errors import UserError


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """What a file holds that should be one JSON object.

    Args:
        path: the file.
        remedy: what to do where it is none, for the message.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: is no JSON object; {remedy}")
    return content
