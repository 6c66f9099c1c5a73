"""A small run, for the tests of configurations."""

from pathlib import Path
from typing import Any

import pytest

from lib.config.data_facts import CorpusFacts, SplitRange, TokensFacts
from lib.config.data_section import DataSection
from lib.config.operation import CheckpointConfig
from lib.config.run_config import Params, RunConfig, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from tests.config.project_folder import ROOT


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
            data=DataSection.model_validate(sections.get("data", {})),
            corpora=("stdlib",),
        )

    def corpus(self, name: str, *tokens: int, **keys: Any) -> CorpusFacts:
        """A corpus of 100 documents with so many tokens in train, valid and test."""
        documents = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
        splits = {
            split: SplitRange(documents=documents[split], tokens=count, samples=(count - 1) // 16)
            for split, count in zip(documents, tokens, strict=True)
        }
        facts = {
            "manifest": f"data/tokens/{name}/manifest.json",
            "tokens_sha256": f"sha256 of {name}",
            "dtype": "uint16",
            "documents": 100,
            "tokens": sum(tokens),
            "splits": splits,
        }
        return CorpusFacts.model_validate({**facts, **keys})

    def facts(self, **keys: Any) -> TokensFacts:
        corpora = {"stdlib": self.corpus("stdlib", 641, 50, 50)}
        facts = {
            "tokenizer_fingerprint": "ff",
            "vocab_size": 300,
            "eod_id": 0,
            "corpora": corpora,
        }
        return TokensFacts.model_validate({**facts, **keys})

    def run_config(self, **sections: dict[str, Any]) -> RunConfig:
        return resolve(self.params(**sections), self.facts())


@pytest.fixture
def make() -> Factory:
    return Factory()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path
