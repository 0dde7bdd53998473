"""Laws 3 and 10: a route folds to its target and preserves the value; all ranks plan the same moves.

Predicted bytes are counted bytes, on each rank and for each move.
"""

from functools import reduce

from hypothesis import assume, given, settings, strategies as st
import torch

from shardwise import CommLog, simulate
from shardwise.comm.execute import mover
from shardwise.comm.many import Pending
from shardwise.comm.rounds import bounded
from shardwise.comm.transport import current
from shardwise.program.spec import spec_of
from shardwise.route.moves import fold, received
from shardwise.route.search import route
from shardwise.tensor.dtensor import wrap
from shardwise.testing.strategies import layout_pairs, layouts, mesh_of, placed

OPS = ("sum", "max", "min", "product")
PAIRS = st.one_of(layout_pairs(ops=OPS), layout_pairs(ops=OPS, chosen=True))
SUMS = st.one_of(layout_pairs(ops=("sum",)), layout_pairs(ops=("sum",), chosen=True))
SMALL = st.sampled_from([mesh_of((2, 2)), mesh_of((3,))])
COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def piece_of(x, layout, coord):
    """This rank's addend of a value: unequal addends for what is pending, replicas elsewhere."""
    offsets, sizes = layout.box(coord)
    local = x[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]
    local = torch.empty_like(x, memory_format=torch.preserve_format)[
        tuple(slice(0, n) for n in sizes)
    ].copy_(local)
    for a, op in enumerate(layout.partial):
        n, i = layout.mesh.shape[a], coord[a]
        if op == "sum":
            local = local * (i + 1 if i < n - 1 else 1 - n * (n - 1) // 2)
        elif op == "product":
            local = (
                torch.full_like(local, 2.0**i)
                if i < n - 1
                else local * 2.0 ** -((n - 1) * (n - 2) // 2)
            )
        elif op in ("max", "min"):  # any one rank attains it, at every second place another one
            away = 1 if op == "min" else -1
            grid = torch.arange(local.numel()).reshape(local.shape)
            local = torch.where((grid + i) % n == 0, local, local + away * (1 + i))
    order = sorted(range(x.ndim), key=lambda d: (-layout.stride[d], d))
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(inverse)


def value_of(layout, locals_):
    """The whole value, put together by hand from all ranks' pieces."""
    mesh = layout.mesh
    out = torch.zeros(layout.shape, dtype=locals_[0].dtype)
    seen = {}
    for coord, local in zip(mesh.coordinates(), locals_):
        offsets, sizes = layout.box(coord)
        assert tuple(local.shape) == sizes
        own = tuple(c for a, c in enumerate(coord) if layout.partial[a])
        where = tuple(c for a, c in enumerate(coord) if not layout.partial[a])
        assert (where, own) not in seen
        seen[where, own] = (offsets, sizes, local)
    for where in {w for w, _ in seen}:
        parts = [v for (w, _), v in sorted(seen.items(), key=lambda kv: kv[0]) if w == where]
        op = next((o for o in layout.partial if o), "sum")
        total = reduce(COMBINE[op], [p[2] for p in parts])
        at = tuple(slice(o, o + n) for o, n in zip(*parts[0][:2]))
        out[at] = total
    return out


@given(PAIRS)
def test_a_route_is_well_typed(pair):
    src, dst = pair
    cur = src
    for move in route(src, dst):
        assert move.src is cur
        assert fold(move) == (move.dst.dims, move.dst.partial)
        cur = move.dst
    assert (cur.dims, cur.partial) == (dst.dims, dst.partial)


@given(PAIRS)
def test_a_route_preserves_the_value(pair):
    src, dst = pair
    torch.manual_seed(0)
    x = torch.randint(-4, 5, src.shape).double()
    x = torch.empty_strided(src.shape, src.stride, dtype=x.dtype).copy_(x)

    def on_rank(rank):
        coord = src.mesh.coordinate_of(rank)
        local = piece_of(x, src, coord)
        kept = local.clone()
        move = mover(src, dst, current())
        out = move(local)
        assert torch.equal(local, kept)
        assert out.shape == dst.box(coord)[1]
        return out, [(m.kind, m.axes, m.dim, m.op) for m in move.moves]

    results = simulate(on_rank, len(src.mesh.ranks))
    got = value_of(dst, [out for out, _ in results])
    assert torch.equal(got, x), f"{src} -> {dst}"
    plans = [plan for _, plan in results]
    assert all(p == plans[0] for p in plans)


@given(PAIRS, st.sampled_from([1, 2, 5, 100]), st.booleans())
def test_a_route_in_rounds_preserves_the_value(pair, times, under_way):
    src, dst = pair
    slab = times * 10 * 8 * len(src.mesh.ranks)  # from the least that there is
    x = torch.randint(-4, 5, src.shape).double()
    x = torch.empty_strided(src.shape, src.stride, dtype=x.dtype).copy_(x)

    def on_rank(rank):
        local = piece_of(x, src, src.mesh.coordinate_of(rank))
        kept = local.clone()
        move = bounded(mover(src, dst, current()), slab)
        out = Pending(move, local).wait() if under_way else move(local)
        assert torch.equal(local, kept)
        return out

    assert torch.equal(value_of(dst, simulate(on_rank, len(src.mesh.ranks))), x)


@given(SUMS)
def test_the_locals_keep_the_memory_order_of_the_layout(pair):
    src, dst = pair
    x = torch.randn(src.shape, dtype=torch.float64)

    def on_rank(rank):
        move = mover(src, dst, current())
        if not move.moves:
            return True
        out = move(piece_of(x, src, src.mesh.coordinate_of(rank)))
        order = sorted(range(src.ndim), key=lambda d: (-src.stride[d], d))
        return out.permute(order).is_contiguous()

    assert all(simulate(on_rank, len(src.mesh.ranks)))


@given(SUMS)
def test_predicted_bytes_are_counted_bytes(pair):
    src, dst = pair
    x = torch.randn(src.shape, dtype=torch.float64)
    world = len(src.mesh.ranks)

    def on_rank(rank):
        coord = src.mesh.coordinate_of(rank)
        local = piece_of(x, src, coord)
        out = []
        for move in route(src, dst):
            with CommLog() as log:
                local = mover(move.src, move.dst, current())(local)
            out.append(log.bytes)
        return out

    per_rank = simulate(on_rank, world)
    for rank, counted in enumerate(per_rank):
        coord = src.mesh.coordinate_of(rank)
        assert counted == [received(move, coord) for move in route(src, dst)]


DTYPES = (torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8, torch.complex64)


@given(st.sampled_from(DTYPES), st.data())
def test_routes_of_every_dtype(dtype, data):
    """Shards and replicas of any dtype; pending sums where the dtype adds up."""
    mesh = data.draw(st.sampled_from([mesh_of((4,)), mesh_of((2, 2))]))
    ops = () if dtype is torch.bool else ("sum",)
    src = data.draw(layouts(mesh=st.just(mesh), ops=ops, dtype=dtype))
    dims, partial = data.draw(placed(mesh, src.ndim, ops))
    dst = src.with_placement(dims, partial)
    x = torch.randint(0, 2, src.shape).to(dtype)
    x = torch.empty_strided(src.shape, src.stride, dtype=dtype).copy_(x)

    def on_rank(rank):
        coord = mesh.coordinate_of(rank)
        offsets, sizes = src.box(coord)
        local = x[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone()
        if any(op and coord[a] for a, op in enumerate(src.partial)):
            local = torch.zeros_like(local)
        out = mover(src, dst, current())(local)
        assert out.dtype == dtype
        return out

    locals_ = simulate(on_rank, 4)
    if dtype is torch.bool:
        got = value_of(dst, [t.to(torch.int64) for t in locals_]).to(dtype)
    else:
        got = value_of(dst, locals_)
    assert torch.equal(got, x)


@given(st.one_of(layouts(mesh=SMALL), layouts(mesh=SMALL, chosen=True)), st.data())
def test_the_backward_of_a_route_is_its_transpose(src, data):
    """<w, move(x)> = <back(w), x> summed over ranks, for all w and x: the definition of a transpose.

    Where the source has replicas, they must be equal for a move to make sense, so only others are drawn; so must
    the gradients be where the target has a pending sum.
    """
    sharding = {a for axes in src.dims for a in axes}
    assume(all(src.partial[a] or a in sharding for a in range(src.mesh.ndim)))
    dims, partial = data.draw(placed(src.mesh, src.ndim, ("sum",)))
    dst = src.with_placement(dims, partial)

    def on_rank(rank):
        torch.manual_seed(rank)
        coord = src.mesh.coordinate_of(rank)
        x = torch.randn(src.box(coord)[1], dtype=torch.float64).requires_grad_()
        out = mover(src, dst, current())(x)
        torch.manual_seed(
            100 + src.mesh.rank_at([0 if op else i for i, op in zip(coord, partial)])
        )
        w = torch.randn(dst.box(coord)[1], dtype=torch.float64)
        (g,) = torch.autograd.grad(out, x, w)
        return (w * out).sum().item(), (g * x).sum().item()

    pairs = simulate(on_rank, len(src.mesh.ranks))
    left, right = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    assert abs(left - right) <= 1e-9 * max(1, abs(left))


@settings(max_examples=10)
@given(st.one_of(layouts(ops=("sum",)), layouts(ops=("sum",), chosen=True)))
def test_the_way_there_and_back_is_the_identity(layout):
    x = torch.randint(-4, 5, layout.shape).double()

    def on_rank(rank):
        transport = current()
        whole = layout.replicated()
        local = piece_of(x, layout, layout.mesh.coordinate_of(rank))
        there = mover(layout, whole, transport)(local)
        back = mover(whole, layout, transport)(there)
        d = wrap(back, spec_of(layout, transport))
        return d.full_tensor()

    for full in simulate(on_rank, len(layout.mesh.ranks)):
        assert torch.equal(full, x)
