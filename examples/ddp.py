"""DistributedDataParallel within a budget: one plan for all ranks, made before the model is wrapped.

torchrun --nproc-per-node 2 examples/ddp.py            # on the CPU, or one GPU a rank
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import lowtide.distributed
from lowtide.zoo.gpt import GPT


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same weights everywhere, and then batches of each rank's own
    model = GPT(layers=6, width=128, heads=4, vocab=1000, context=128, dropout=0.1).to(device)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(1000, (8, 128), device=device)
    targets = torch.randint(1000, (8 * 128,), device=device)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)

    plan = lowtide.distributed.plan(
        model,
        tokens,
        loss=loss_of,
        optimizer="adamw",
        budget="75%",  # of what one rank would hold; "8GiB" on a real one
        engine=lowtide.distributed.Replicated(),
    )
    model = lowtide.apply(model, plan)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters())

    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(replica(tokens))
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)

    dist.barrier()
    if rank == 0:
        print(
            f"every rank holds {lowtide.format_bytes(plan.peak_bytes)} at its peak, DDP's buckets included, "
            f"within a budget of {lowtide.format_bytes(plan.budget_bytes or 0)}"
        )
    # Were the replica the last to let go of the process group, it would wait for the group's threads while
    # holding the lock that they may need to end.
    del replica
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
