"""The runs that figures were measured of, on H200 GPUs (docs/performance.md)."""

from lib.config.run_config import resolve_model
from lib.config.schema import ModelSection, ParallelConfig
from lib.plan.work import Work

LLAMA = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
REFERENCE = resolve_model(
    ModelSection(
        num_layers=24, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=5504, **LLAMA
    ),
    2048,
)
SMALL = resolve_model(
    ModelSection(num_layers=12, hidden_size=768, num_attention_heads=12, **LLAMA), 1024
)


def work(model=REFERENCE, sizes=(8, 4), *, seq_length=None, compute="bf16", **layout):
    parallel = ParallelConfig(**{"data": 1} | layout)
    length = seq_length or model.max_position_embeddings
    return Work(model, 50304, length, *sizes, parallel, compute)


SINGLE = work()
DATA = work(data=2)
PIPELINE = work(sizes=(4, 16), pipeline=2)
TENSOR = work(tensor=2, sequence=True)
