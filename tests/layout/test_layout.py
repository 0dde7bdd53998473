"""Layouts: interned values, three notations, relatives."""

import copy
import pickle

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError, MeshError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh, join

MESH = Mesh.of("cpu", (2, 3), tuple(range(6)), ("dp", "tp"))
R, P = Replicate(), Partial()


def of(placements, shape=(6, 4), **kwargs):
    return Layout.of(MESH, placements, shape, dtype=torch.float32, **kwargs)


def test_notations_mean_the_same_object():
    want = of([Shard(0), Shard(1)])
    assert of(("dp", "tp")) is want
    assert of((("dp",), ["tp"])) is want
    assert of([Shard(-2), Shard(-1)]) is want
    assert of([Shard(0, order=0), Shard(1)]) is want
    assert of(want) is want
    assert copy.deepcopy(want) is copy.copy(want) is want
    assert pickle.loads(pickle.dumps(want)) is want


def test_what_is_missing_is_replicated():
    assert of(None) is of([]) is of([R, R]) is of((None, None)) is of(())
    assert of([Shard(1)]) is of([Shard(1), R])
    assert of(("tp",)) is of([R, Shard(0)])
    assert of("tp") is of([R, Shard(0)])
    assert of(Shard(1)) is of([Shard(1), R])


def test_order_is_part_of_the_layout():
    outer_dp, outer_tp = of((("dp", "tp"), None)), of((("tp", "dp"), None))
    assert outer_dp is not outer_tp
    assert outer_dp.placements == (Shard(0), Shard(0))
    assert outer_tp.placements == (Shard(0, order=1), Shard(0, order=0))
    assert of(outer_tp.placements) is outer_tp
    assert outer_tp.spec == (("tp", "dp"), None)
    assert outer_dp.box((0, 1)) == ((1, 0), (1, 4))
    assert outer_tp.box((0, 1)) == ((2, 0), (1, 4))


def test_text():
    assert str(of([Shard(0), P])) == "f32[6, 4] {dp: S(0), tp: P}"
    assert (
        str(of((("tp", "dp"),)).with_dtype(torch.bfloat16))
        == "bf16[6, 4] {dp: S(0)@1, tp: S(0)@0}"
    )
    unnamed = Mesh.of("cpu", (2,), (0, 1))
    assert (
        str(Layout.of(unnamed, [Partial("max")], (), dtype=torch.int64)) == "i64[] {0: P(max)}"
    )


def test_questions():
    x = of([Shard(0), P])
    assert (x.ndim, x.numel) == (2, 24)
    assert x.is_sharded
    assert x.is_partial
    assert not x.is_replicated
    assert x.axis_dim(0) == 0
    assert x.axis_dim(1) is None
    assert of(None).is_replicated
    assert of(None, stride=(1, 6)).is_contiguous is False
    assert of([Shard(0)]).is_even_dim(0)
    assert not of([R, Shard(1)]).is_even_dim(1)
    assert of((("dp", "tp"),), shape=(4, 1)).has_empty()
    assert not of((("dp", "tp"),), shape=(6, 1)).has_empty()


def test_dual():
    assert of([R, R]).dual() is of([P, P])
    assert of([Shard(1), P]).dual() is of([Shard(1), R])
    assert of([Shard(0), Shard(0)]).dual() is of([Shard(0), Shard(0)])


def test_reading_a_slice_on_its_mesh():
    tp = Mesh.of("cpu", (3,), (3, 4, 5), ("tp",))
    x = Layout.of(tp, [Shard(1)], (6, 4), dtype=torch.float32)
    assert x.on(MESH) is of([R, Shard(1)])
    with pytest.raises(MeshError, match="no slice of it"):
        x.on(Mesh.of("cpu", (2,), (0, 1)))


@pytest.mark.parametrize(
    ("placements", "error", "text"),
    [
        ([R, R, R], LayoutError, r"3 placements \(R, R, R\) for a mesh with 2 axes"),
        ([Shard(2)], LayoutError, r"Shard\(dim=2\) on a tensor with 2 dims \(mesh axis dp\)"),
        (
            [R, Shard(-3)],
            LayoutError,
            r"Shard\(dim=-3\) on a tensor with 2 dims \(mesh axis tp\)",
        ),
        (("dp", None, "tp"), LayoutError, "a spec of 3 entries"),
        (("dp", "dp"), LayoutError, "uses a mesh axis twice"),
        ((("dp", "dp"), None), LayoutError, "uses a mesh axis twice"),
        (("pp", None), MeshError, 'the mesh has no axis "pp"'),
        ([0, 1], LayoutError, "not a placement: 0"),
        ([P, Partial("max")], LayoutError, "do not commute"),
    ],
)
def test_what_cannot_be_is_refused(placements, error, text):
    with pytest.raises(error, match=text):
        of(placements)


def test_a_layout_of_other_dims_is_refused():
    with pytest.raises(LayoutError, match="is of 2 dims, the tensor has 3"):
        of(of([Shard(0)]), shape=(6, 4, 2))


def test_pending_averages_and_sums_may_stand_side_by_side():
    assert of([Partial("avg"), P]).partial == ("avg", "sum")


def test_join():
    dp = Mesh.of("cpu", (2,), (0, 3), ("dp",))
    tp = Mesh.of("cpu", (3,), (0, 1, 2), ("tp",))
    assert join([dp, MESH]) is MESH
    assert join([tp, MESH, dp]) is MESH
    with pytest.raises(MeshError, match="meshes that cannot be combined"):
        join([dp, tp])
