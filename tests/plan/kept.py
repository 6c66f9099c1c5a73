"""What a forward pass really keeps for its backward, in bytes."""

import torch

from lib.model.loss import MicroBatch, run_chunk


def kept_bytes(model, sequence, batch):
    """Bytes that autograd keeps of a micro batch; parameters, tokens and positions left out."""
    rest = model.groups.tp.size if model.groups.sequence_parallel else 1
    tokens = torch.randint(0, model.vocab_size, (sequence, batch))
    weights = torch.ones(sequence, batch)
    if model.embedding is None:
        hidden = model.config.hidden_size
        dtype = next(model.parameters()).dtype
        received = torch.randn(sequence // rest, batch, hidden, dtype=dtype, requires_grad=True)
    else:
        received = None
    others = {p.untyped_storage().data_ptr() for p in model.parameters()}
    others |= {x.untyped_storage().data_ptr() for x in (tokens, weights)}
    if model.rotary is not None:
        table = model.rotary.table(sequence, tokens.device)
        others.add(table.untyped_storage().data_ptr())
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run_chunk(model, MicroBatch(tokens, tokens, weights, tokens.numel()), received)
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert result.requires_grad
    return sum(size for place, size in sizes.items() if place not in others)
