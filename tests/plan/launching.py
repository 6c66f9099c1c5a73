"""Launch lines for the tests of the import."""

from lib.plan.megatron_import import Import, import_launch

BASE = {
    "num-layers": "8",
    "hidden-size": "256",
    "num-attention-heads": "8",
    "seq-length": "128",
    "max-position-embeddings": "128",
    "micro-batch-size": "2",
    "global-batch-size": "32",
    "lr": "1e-3",
    "train-iters": "1000",
    "data-path": "corpus_text_document",
    "vocab-file": "v.json",
    "merge-file": "m.txt",
}


def launch(without: str = "", launcher: str = "python", **more: object) -> Import:
    """The import of the flags above and ``more``; True is a flag without a value."""
    given = {name: value for name, value in BASE.items() if name not in without.split()}
    given |= {name.replace("_", "-"): value for name, value in more.items()}
    words = [f"--{name}" + ("" if value is True else f" {value}") for name, value in given.items()]
    return import_launch(f"{launcher} pretrain_gpt.py {' '.join(words)}", {}, ["stdlib"])


def written(found: Import, *names: str) -> list[object]:
    return [found.settings[name].value for name in names]


def problems(found: Import) -> str:
    return "\n".join(map(str, found.problems))
