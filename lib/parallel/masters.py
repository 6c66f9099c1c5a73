"""Master parameters: what is updated and saved, sharded over the data-parallel ranks.

Each is a DTensor that records how it is cut, over the tensor-parallel and the data-parallel ranks,
so that the optimizer and ``torch.distributed.checkpoint`` handle any layout without code of ours.
What layers compute with is another tensor, see ``lib.parallel.compute_block``. ``fully_shard``
serves to cut: dimension 0 over the ranks, as ``torch.chunk`` does. Nothing is ever called through
the module that it is given.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lib.parallel.mesh import data_mesh
from lib.parallel.storage import Cut


def create_masters(
    cuts: Mapping[str, Cut], mesh: DeviceMesh, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Uninitialised masters by name; each rank gets memory for its own shards alone.

    Args:
        cuts: how the tensor-parallel group holds each.
        mesh: from ``lib.parallel.mesh.build_mesh``.
        dtype: fp32, or fp64.
    """
    holder = nn.Module()
    for number, cut in enumerate(cuts.values()):
        held = torch.empty(cut.held_shape, dtype=dtype, device="meta")
        if mesh["tp"].size() > 1:
            placement = Replicate() if cut.dim is None else Shard(cut.dim)
            held = DTensor.from_local(held, mesh["tp"], [placement], run_check=False)
        holder.register_parameter(str(number), nn.Parameter(held))
    fully_shard(holder, mesh=data_mesh(mesh))
    holder.to_empty(device=mesh.device_type)
    return dict(zip(cuts, holder.parameters(), strict=True))


@torch.no_grad()
def fill_shard(master: nn.Parameter, value: Tensor, mesh: DeviceMesh) -> None:
    """Gives a master this rank's piece of its value.

    Args:
        master: from ``create_masters``.
        value: this tensor-parallel rank's part, not cut over the data-parallel ranks.
        mesh: that of ``create_masters``.
    """
    assert isinstance(master, DTensor)
    axes = data_mesh(mesh)
    axis = axes.ndim - 1
    # Dimension 0 is cut as torch.chunk does; late ranks may be left without a row.
    pieces = value.chunk(axes.size(axis), dim=0)
    rank = axes.get_local_rank(axis)
    piece = pieces[rank] if rank < len(pieces) else value[:0]
    master.to_local().copy_(piece)


def gradient_of(master: nn.Parameter, shard: Tensor) -> DTensor:
    """A gradient for a master, cut as it is.

    Args:
        master: from ``create_masters``.
        shard: this rank's piece of the gradient; its memory is shared.
    """
    assert isinstance(master, DTensor)
    return DTensor.from_local(
        shard,
        master.device_mesh,
        master.placements,
        run_check=False,
        shape=master.shape,
        stride=master.stride(),
    )
