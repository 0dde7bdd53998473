"""One tensor on four ranks: distribute, multiply, redistribute, differentiate.

No launcher is needed: python examples/02_minimal.py
"""

import torch

import shardwise
from shardwise import Replicate, Shard


def program():  # every rank runs this
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a = torch.arange(24.0).view(4, 6)
    b = torch.ones(6, 8)

    # Rows over dp, columns over tp.
    x = shardwise.distribute_tensor(a, mesh, [Shard(0), Shard(1)])
    w = shardwise.distribute_tensor(b, mesh, [Replicate(), Shard(0)]).requires_grad_()

    # The contracted dim is cut over tp: each rank has a term of the sum, and nothing is sent.
    y = x @ w
    z = y.redistribute(placements=[Shard(0), Replicate()])  # an all-reduce over tp
    z.square().sum().backward()  # w.grad has w's layout; it was summed over dp

    plain = b.clone().requires_grad_()  # the same on one device
    (a @ plain).square().sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
    shown = {"y": y, "z": z, "w.grad": w.grad}
    return [f"{k}: {t.placements}, here {tuple(t.to_local().shape)}" for k, t in shown.items()]


if __name__ == "__main__":
    for rank, lines in enumerate(shardwise.simulate(program, 4)):
        print(f"rank {rank}", *lines, sep="\n  ")
