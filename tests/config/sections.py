"""Small sections of params.yaml, for the tests of rules."""

from collections.abc import Iterator
from typing import Any

from lib.config.data_section import DataSection
from lib.config.operation import EvaluateConfig, LaunchConfig
from lib.config.schema import (
    ModelSection,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.errors import Problem

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
TRAINING = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 10}


def model(**keys: Any) -> ModelSection:
    return ModelSection.model_validate({**MODEL, **keys})


def training(**keys: Any) -> TrainingSection:
    return TrainingSection.model_validate({**TRAINING, **keys})


def ramped(batch: int, start: int, increment: int, samples: int, **keys: Any) -> TrainingSection:
    """A training section with a ramp-up, its length in samples."""
    rampup = {
        "global_batch_size": batch,
        "rampup_start_batch_size": start,
        "rampup_increment": increment,
        "rampup_samples": samples,
    }
    lengths = {"train_iters": None, "train_samples": 100}
    return training(**{"micro_batch_size": 1, **lengths, **rampup, **keys})


def schedule(**keys: Any) -> ScheduleSection:
    return ScheduleSection.model_validate(keys)


def parallel(**keys: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(keys)


def precision(**keys: Any) -> PrecisionConfig:
    return PrecisionConfig.model_validate(keys)


def data(**keys: Any) -> DataSection:
    return DataSection.model_validate(keys)


def evaluate(**keys: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate(keys)


def launch(**keys: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(keys)


def only(found: Iterator[Problem]) -> str:
    problems = list(found)
    assert len(problems) == 1, problems
    return str(problems[0])
