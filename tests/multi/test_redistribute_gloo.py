"""Moves in four real processes over Gloo: every pair, ranks that hold nothing, two meshes, under way."""

import contextlib
import itertools
import socket

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    minimize,
    redistribute_many,
)
from shardwise.testing.sweep import lay_out

KINDS = [Replicate(), Partial(), Shard(0), Shard(1)]
WORLD = 4


def check_pairs(rank):
    for shape, size in itertools.product([(4,), (2, 2)], [(1, 2), (5, 3), (0, 2)]):
        mesh = init_device_mesh("cpu", shape)
        x = torch.arange(size[0] * size[1]).double().view(size)
        places = list(itertools.product(KINDS, repeat=len(shape)))
        pairs = list(itertools.product(places, places))
        for scope in (contextlib.nullcontext(), minimize("bytes")):
            with scope:
                for src, dst in pairs[:: 1 if len(shape) == 1 else 3]:
                    d = lay_out(x, mesh, src)
                    assert torch.equal(d.redistribute(mesh, dst).full_tensor(), x), (src, dst)
        ds = [lay_out(x, mesh, src) for src, _ in pairs]
        flying = [d.redistribute(mesh, dst, async_op=True) for d, (_, dst) in zip(ds, pairs)]
        many = redistribute_many(ds, [dst for _, dst in pairs])
        for a, b in zip(flying, many):
            assert torch.equal(a.full_tensor(), x)
            assert torch.equal(b.full_tensor(), x)


class Peak(TorchDispatchMode):
    """The most bytes alive at once of what is allocated inside, apart from what is known."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.live:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {k: (ref, n) for k, (ref, n) in self.live.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self.live.values()))
        return out


def extra_bytes(x, mesh, dst, **options):
    """What a move takes next to its operand, and the larger of both pieces."""
    x.redistribute(mesh, dst, **options)
    with Peak(x._local) as peak:
        y = x.redistribute(mesh, dst, **options)
    return peak.most, max(x._local.nbytes, y._local.nbytes)


def check_memory(rank):
    r, p, s = Replicate(), Partial(), Shard
    for dtype, shape, src, dst in [
        (torch.float32, (4,), [s(0)], [s(1)]),
        (torch.float32, (4,), [s(1)], [r]),
        (torch.float32, (4,), [p], [r]),
        (torch.bfloat16, (4,), [p], [s(1)]),
        (torch.float32, (4,), [s(1, sizes=(10, 500, 0, 2))], [s(0)]),
        (torch.float32, (2, 2), [p, s(0)], [r, r]),
        (torch.float32, (2, 2), [s(0), r], [r, s(1)]),
        (torch.float32, (4,), [s(0)], [p]),
    ]:
        mesh = init_device_mesh("cpu", shape)
        whole = torch.randint(-8, 8, (512, 512)).to(dtype)
        dist.broadcast(whole, 0)
        x = lay_out(whole, mesh, src)
        slab = whole.nbytes // 32
        took, larger = extra_bytes(x, mesh, dst, max_extra_bytes=slab)
        assert took <= larger + slab, (src, dst, took, larger)
        y = x.redistribute(mesh, dst, max_extra_bytes=slab)
        assert torch.equal(y.full_tensor(), whole)
    whole = torch.randn(512, 512)
    mesh = init_device_mesh("cpu", (4,))
    took, _ = extra_bytes(lay_out(whole, mesh, [s(0)]), mesh, [s(1)])
    assert took <= 2 * whole.nbytes // 4


def check_memory_elsewhere(rank):
    """Under way, backward, on a slice, on another mesh, in a list."""
    r, p, s = Replicate(), Partial(), Shard
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.randint(-8, 8, (512, 256)).float()
    dist.broadcast(whole, 0)
    slab = whole.nbytes // 16
    other = DeviceMesh("cpu", [3, 0, 1])
    moves = [
        (mesh, [s(0), s(1)], [s(1), r]),
        (mesh, [p, s(0)], [r, s(1)]),
        (mesh, [s(1), r], [p, s(1)]),
        (mesh["b"], [s(0), s(1)], [r]),
        (mesh["b"], [p, s(0)], [s(1)]),
        (other, [s(1), s(0)], [s(0)]),
        (other, [p, r], [p]),
    ]
    for (on, src, dst), async_op in itertools.product(moves, [False, True]):
        x = lay_out(whole, mesh, src).requires_grad_()
        options = {"max_extra_bytes": slab, "async_op": async_op}
        y = x.redistribute(on, dst, **options)
        larger = max(x._local.nbytes, y._local.nbytes)
        with Peak(x._local) as peak:
            y = x.redistribute(on, dst, **options)
            y.to_local()
        assert peak.most <= larger + slab, (src, dst, async_op, peak.most, larger, slab)
        g = torch.ones_like(y._local)
        with Peak(x._local, y._local, g) as peak:
            torch.autograd.grad(y._local, x._local, g)
        assert peak.most <= larger + slab, (src, dst, "backward", peak.most, larger, slab)
    for on in (mesh, other):
        pairs = [(src, dst) for m, src, dst in moves if m is on]
        xs = [lay_out(whole[: 512 - 7 * i], mesh, src) for i, (src, _) in enumerate(pairs)]
        xs += [lay_out(torch.ones(8), mesh, [r, r]) for _ in range(40)]
        to = [dst for _, dst in pairs] + [[s(0), s(0)] if on is mesh else [s(0)]] * 40
        ys = redistribute_many(xs, to, on, max_extra_bytes=slab)
        results = sum(y._local.nbytes for y in ys)
        shrinks = max(max(0, x._local.nbytes - y._local.nbytes) for x, y in zip(xs, ys))
        del ys
        with Peak(*(x._local for x in xs)) as peak:
            redistribute_many(xs, to, on, max_extra_bytes=slab)
        assert peak.most <= results + shrinks + slab, (on, peak.most, results, shrinks, slab)


def check_meshes(rank):
    """Subsets, other shapes, disjoint meshes; pieces of some rows, of one, of none; at once and in rounds."""
    meshes = [
        ([0, 1, 2, 3], [0, 1]),
        ([0, 1], [[3, 2], [1, 0]]),
        ([2], [0, 1, 3]),
        ([3, 0], [1, 2]),
    ]
    sizes = [(5, 3), (1, 3), (0, 2), (3, 1)]
    for (a, b), size, limit in itertools.product(meshes, sizes, [None, 400]):
        x, w = torch.randn(size).double(), torch.randn(size).double()
        dist.broadcast(x, 0)
        dist.broadcast(w, 0)
        one, two = DeviceMesh("cpu", a), DeviceMesh("cpu", b)
        d = distribute_tensor(x, one, [Shard(0)]).requires_grad_()
        to = [Shard(1)] if two.ndim == 1 else [Shard(1), Partial()]
        y = d.redistribute(two, to, max_extra_bytes=limit)
        (y * distribute_tensor(w, two, [Shard(1)])).sum().backward()
        if two.coordinate_of(rank) is not None:
            assert torch.equal(y.full_tensor().detach(), x)
        if one.coordinate_of(rank) is not None:
            assert torch.equal(d.grad.full_tensor(), w)


def check_profile(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    found = mesh.profile()
    said = [None] * WORLD
    dist.all_gather_object(said, found)
    assert len(set(said)) == 1


def main(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    check_pairs(rank)
    check_meshes(rank)
    check_memory(rank)
    check_memory_elsewhere(rank)
    check_profile(rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multi
def test_over_gloo():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spawn(main, (port,), nprocs=WORLD)
