"""Laws 1 and 2: the boxes of all ranks tile the tensor; gather(distribute(x, L)) is x."""

import pickle

from hypothesis import given, strategies as st
import torch

from shardwise import DTensor, distribute_tensor, simulate
from shardwise.layout.layout import Layout
from shardwise.testing.strategies import layouts, meshes, placed

ANY = st.one_of(layouts(), layouts(chosen=True))
MANY = ("sum", "max", "min")


@given(ANY)
def test_boxes_tile_the_tensor(layout):
    """Every element is on exactly as many ranks as the layout has replicas."""
    count = torch.zeros(layout.shape, dtype=torch.int64)
    for coord in layout.mesh.coordinates():
        offsets, sizes = layout.box(coord)
        assert all(o + n <= s for o, n, s in zip(offsets, sizes, layout.shape) if n)
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))] += 1
    sharding = {a for axes in layout.dims for a in axes}
    replicas = 1
    for a, n in enumerate(layout.mesh.shape):
        replicas *= 1 if a in sharding else n
    assert (count == replicas).all()


@given(layouts())
def test_the_first_piece_is_the_largest_and_no_dim_is_lost(layout):
    first = layout.box((0,) * layout.mesh.ndim)[1]
    for coord in layout.mesh.coordinates():
        assert all(n <= most for n, most in zip(layout.box(coord)[1], first))


@given(ANY)
def test_layouts_are_interned_and_notations_round_trip(layout):
    again = Layout.of(layout.mesh, layout.placements, layout.shape, layout.stride, layout.dtype)
    assert again is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    if not layout.is_partial and not layout.is_sized:
        assert (
            Layout.of(layout.mesh, layout.spec, layout.shape, layout.stride, layout.dtype)
            is layout
        )
    assert Layout.of(layout.mesh, layout, layout.shape, layout.stride, layout.dtype) is layout


@given(ANY)
def test_dual_swaps_replicas_and_sums(layout):
    dual = layout.dual()
    assert dual.dual() is layout
    assert dual.dims == layout.dims
    sharding = {a for axes in layout.dims for a in axes}
    for a, (op, other) in enumerate(zip(layout.partial, dual.partial)):
        assert a in sharding or (op is None) != (other is None)


@given(st.one_of(layouts(ops=MANY), layouts(ops=MANY, chosen=True)), st.sampled_from([0, None]))
def test_gather_of_distribute_is_the_tensor(layout, src):
    x = torch.arange(layout.numel, dtype=torch.float64).reshape(layout.shape) - 3
    x = torch.empty_strided(layout.shape, layout.stride, dtype=x.dtype).copy_(x)
    kept = x.clone()

    def on_rank():
        d = distribute_tensor(x, layout.mesh, layout, src_data_rank=src)
        assert d.to_local().shape == d._spec.local_shape
        assert d.layout.dims == layout.dims
        full = d.full_tensor()
        assert (
            full.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
        )
        return full

    for full in simulate(on_rank, len(layout.mesh.ranks)):
        assert full.shape == x.shape
        assert torch.equal(full, x)
    assert torch.equal(x, kept)


@given(st.data())
def test_from_local_of_the_pieces_is_the_tensor(data):
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dims, partial = data.draw(placed(mesh, len(shape), ()))
    layout = Layout(
        mesh, dims, partial, shape, tuple(torch.empty(shape).stride()), torch.float32
    )
    x = torch.arange(float(layout.numel)).reshape(shape)

    def on_rank():
        local = distribute_tensor(x, mesh, layout).to_local()
        d = DTensor.from_local(local, mesh, layout.placements)
        assert d.layout.dims == dims
        return d.full_tensor()

    for full in simulate(on_rank, len(mesh.ranks)):
        assert torch.equal(full, x)
        assert full.shape == x.shape
