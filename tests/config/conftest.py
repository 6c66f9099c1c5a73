"""A small run, for the tests of configurations."""

from typing import Any

import pytest

from lib.config.operation import CheckpointConfig
from lib.config.run_config import DataFacts, Params, RunConfig, SplitRange, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)


class Factory:
    """Builds parameters, facts and run configurations with some keys changed."""

    def params(self, **sections: dict[str, Any]) -> Params:
        model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
        training = {
            "seq_length": 16,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 10,
        }
        return Params(
            model=ModelSection.model_validate({**model, **sections.get("model", {})}),
            precision=PrecisionConfig(),
            parallel=ParallelConfig.model_validate(sections.get("parallel", {})),
            optimizer=OptimizerConfig(lr=1e-3),
            schedule=ScheduleSection.model_validate(sections.get("schedule", {})),
            training=TrainingSection.model_validate({**training, **sections.get("training", {})}),
            checkpoint=CheckpointConfig(),
        )

    def facts(self, **keys: Any) -> DataFacts:
        facts = {
            "prefix": "data/tokens/corpus_text_document",
            "tokens_sha256": "aa",
            "tokenizer_fingerprint": "ff",
            "vocab_size": 300,
            "eod_id": 0,
            "dtype": "uint16",
            "documents": 100,
            "tokens": 1000,
            "splits": {
                "train": SplitRange(documents=(0, 90), tokens=641, samples=40),
                "valid": SplitRange(documents=(90, 95), tokens=50, samples=3),
                "test": SplitRange(documents=(95, 100), tokens=50, samples=3),
            },
        }
        return DataFacts.model_validate({**facts, **keys})

    def run_config(self, **sections: dict[str, Any]) -> RunConfig:
        return resolve(self.params(**sections), self.facts())


@pytest.fixture
def make() -> Factory:
    return Factory()
