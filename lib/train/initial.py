"""Starts a run from the weights that ``training.initial_weights`` names, at any layout.

Only a run without a checkpoint comes here: a resumed one has all that it needs in its state, also
when the folder of the weights is gone. Master weights are what the optimizer updates, so they are
what is filled; moments begin at zero, the steps and the learning rate at step 0.
"""

from lib.checkpoint.initial_weights import StoredWeights
from lib.checkpoint.ranks import gather
from lib.config.run_config import RunConfig
from lib.errors import UserError
from lib.train.model_setup import ShardedModel, fill_first_rows


def start_from_weights(model: ShardedModel, config: RunConfig) -> list[str]:
    """Puts the given weights in the place of random ones, if there are any; all ranks call it.

    Each rank hashes the file before it believes it: all read it anyway, side by side, and on
    several machines it may not be one file.

    Args:
        model: fresh from ``build_sharded_model``, with random weights.
        config: the run configuration.

    Returns:
        What to say of it, in lines.

    Raises:
        UserError: on every rank, if on any the folder is missing, damaged, or holds other weights
            than the configuration was made for.
    """
    initial = config.initial
    if initial.sha256 is None:
        return []
    weights, fault = None, ""
    try:
        weights = StoredWeights(config)
    except UserError as error:
        fault = str(error)
    if faults := [each for each in gather(fault) if each]:
        raise UserError(faults[0])
    assert weights is not None
    fill_first_rows(model, config, weights.rows)
    lines = [f"starting from the weights of {initial.folder} (sha256 {initial.sha256})"]
    return lines + [f"new, at random: {part}" for part in initial.new_parts]
