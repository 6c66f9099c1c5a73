"""Whether a run configuration is still that of params.yaml.

``dvc repro`` writes it anew before it trains; ``python -m stages.pretrain`` alone takes it as it
is, and would train what params.yaml said before somebody changed it. Torch-free.
"""

from collections.abc import Iterator

from lib.config.params_file import ParamsFile
from lib.config.run_config import Params, RunConfig, resolve
from lib.errors import UserError

_SHOWN = 4
# What follows from others comes last.
_SECTIONS = ("training", "optimizer", "schedule", "precision", "parallel", "checkpoint")
_SECTIONS += ("model", "data")
_REMEDY = "run dvc repro, or python -m stages.validate_config before this"


def require_current(config: RunConfig, file: ParamsFile, name: str) -> None:
    """Refuses a run configuration that the parameters would not give.

    Args:
        config: what was written.
        file: params.yaml as it is now.
        name: what messages call the run configuration.

    Raises:
        UserError: with the keys that differ.
        InvalidParams: a section of the file is not sound.
    """
    params = Params.from_file(file)
    try:
        # Facts of the corpora do not come from params.yaml; those that were written serve.
        now = resolve(params, config.data, config.initial)
    except (KeyError, ArithmeticError, AssertionError, ValueError):
        # Another corpus, or parameters that break a rule: another run in any case.
        raise UserError(
            f"{name} was written for other corpora or lengths than {file.path} has now; {_REMEDY}"
        ) from None
    keys = list(_differing(config, now))
    weights, given = params.training.initial_weights, config.initial
    folder, _, pin = (weights or "").rpartition("@")
    if folder != (given.folder or "") or not (given.sha256 or "").startswith(pin):
        keys.append(f"training.initial_weights: {weights} (there {given.folder}@{given.sha256})")
    if keys:
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        raise UserError(
            f"{file.path} was changed after {name} was written: {'; '.join(keys[:_SHOWN])}{more}; "
            f"{_REMEDY}"
        )


def _differing(config: RunConfig, now: RunConfig) -> Iterator[str]:
    """Each key with the value that it has now, and the one that was written."""
    before, after = config.model_dump(mode="json"), now.model_dump(mode="json")
    for section in _SECTIONS:
        for key, value in before[section].items():
            if value != after[section][key]:
                shown = f"{after[section][key]} (there {value})"
                yield f"{section}.{key}" + (f": {shown}" if len(shown) < 80 else "")
