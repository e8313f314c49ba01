"""FSDP2 (`fully_shard`) within a budget: planned on the plain model, applied, and sharded afterwards.

torchrun --nproc-per-node 2 examples/fsdp2.py          # on the CPU, or one GPU a rank
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide.distributed
from lowtide.zoo.gpt import GPT


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = GPT(layers=6, width=128, heads=4, vocab=1000, context=128, dropout=0.1).to(device)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(1000, (8, 128), device=device)
    targets = torch.randint(1000, (8 * 128,), device=device)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)

    def shard(whole: nn.Module) -> nn.Module:
        for block in whole.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return whole

    plan = lowtide.distributed.plan(
        model,
        tokens,
        loss=loss_of,
        optimizer="adamw",
        budget="75%",  # of what one rank would hold, sharded; "8GiB" on a real one
        engine=lowtide.distributed.Sharded(shard),
    )
    shard(lowtide.apply(model, plan))
    optimizer = torch.optim.AdamW(model.parameters())

    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model(tokens))
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)

    dist.barrier()
    if rank == 0:
        assert isinstance(plan, lowtide.Solution)
        assert plan.confirmation is not None
        print(
            f"every rank holds {lowtide.format_bytes(plan.confirmation.peak_bytes)} at its peak, shards and "
            f"gathered blocks included, within a budget of {lowtide.format_bytes(plan.budget_bytes or 0)}; "
            f"unplanned it would be {lowtide.format_bytes(plan.confirmation.plain_peak_bytes)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
