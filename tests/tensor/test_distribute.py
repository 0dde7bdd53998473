"""``distribute_tensor`` and what a fresh DTensor says about itself."""

import pytest
import torch

from shardwise import (
    CommLog,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import LayoutError, UnsupportedError

R, P = Replicate(), Partial()


def mesh22():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_metadata_is_global():
    def on_rank(rank):
        x = torch.randn(5, 6, dtype=torch.bfloat16)
        d = distribute_tensor(x, mesh22(), [Shard(0), Shard(1)])
        assert isinstance(d, torch.Tensor)
        assert isinstance(d, DTensor)
        assert d.shape == d.size() == torch.Size([5, 6])
        assert (d.size(0), d.size(-1), d.ndim, d.dim(), d.numel(), len(d)) == (
            5,
            6,
            2,
            2,
            30,
            5,
        )
        assert d.stride() == (6, 1)
        assert d.dtype == torch.bfloat16
        assert d.device == torch.device("cpu")
        assert d.device_mesh == mesh22()
        assert d.placements == (Shard(0), Shard(1))
        assert d.layout.spec == ("dp", "tp")
        assert d.to_local().shape == ((3, 2)[rank // 2], 3)
        assert d._local_tensor is d._local
        assert not d.requires_grad
        assert d.is_leaf

    simulate(on_rank, 4)


@pytest.mark.parametrize(
    "placements",
    [[Shard(0)], [Shard(1), Shard(1)], [R, R], [P, Shard(0)], ("tp",), (None, ("tp", "dp"))],
)
def test_the_source_rank_decides(placements):
    """Other ranks' values do not matter, and nobody's tensor is touched."""

    def on_rank(rank):
        x = torch.full((4, 6), float(rank)) + torch.arange(6)
        kept = x.clone()
        for source in range(4):
            d = distribute_tensor(x, mesh22(), placements, src_data_rank=source)
            full = d.full_tensor()
            assert torch.equal(full, torch.full((4, 6), float(source)) + torch.arange(6))
            d.to_local().fill_(-1)
            assert torch.equal(x, kept)

    simulate(on_rank, 4)


def test_the_source_is_a_position_on_the_mesh():
    def on_rank(rank):
        mesh = DeviceMesh("cpu", [2, 0])
        return (
            distribute_tensor(torch.tensor([float(rank)] * 2), mesh, [Shard(0)])
            .full_tensor()
            .tolist()
        )

    assert simulate(on_rank, 3)[0] == [2.0, 2.0]


def test_without_a_source_nothing_moves():
    x = torch.arange(12.0).reshape(3, 4)

    def on_rank():
        mesh = mesh22()
        for placements in (
            [Shard(0), Shard(1)],
            [R, R],
            [P, R],
            [Shard(1), Shard(1)],
            (("tp", "dp"),),
        ):
            with CommLog() as log:
                d = distribute_tensor(x, mesh, placements, src_data_rank=None)
            assert not log.events
            assert torch.equal(d.full_tensor(), x)
            d.to_local().fill_(-1)
        assert torch.equal(x, torch.arange(12.0).reshape(3, 4))

    simulate(on_rank, 4)


def test_with_a_source_each_rank_receives_its_piece_only():
    x = torch.zeros(8, 8)

    def on_rank(rank):
        with CommLog() as log:
            distribute_tensor(x, mesh22(), [Shard(0), Shard(1)])
        return log.bytes

    assert simulate(on_rank, 4) == [0, 64, 64, 64]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_pending_reductions_of_a_whole_value(op):
    x = torch.tensor([1.5, -2.0, 3.0])

    def on_rank():
        d = distribute_tensor(x, init_device_mesh("cpu", (3,)), [Partial(op)])
        assert d.placements == (Partial("sum" if op == "avg" else op),)
        assert torch.equal(d.full_tensor(), x)

    simulate(on_rank, 3)


def test_requires_grad_and_gradients_stay_with_the_distributed_tensor():
    x = torch.randn(4, 3, requires_grad=True)

    def on_rank():
        d = distribute_tensor(x, mesh22(), [Shard(0)])
        assert d.requires_grad
        assert d.is_leaf
        (d * d).sum().backward()
        assert x.grad is None
        torch.testing.assert_close(d.grad.full_tensor(), 2 * x.detach())
        with torch.no_grad():
            assert distribute_tensor(x, mesh22(), [R]).requires_grad

    simulate(on_rank, 4)


def test_a_parameter_gives_a_tensor_that_a_parameter_can_be_made_of():
    def on_rank():
        p = torch.nn.Parameter(torch.ones(4))
        q = torch.nn.Parameter(distribute_tensor(p, mesh22(), [Shard(0)]))
        assert isinstance(q, torch.nn.Parameter)
        assert isinstance(q, DTensor)
        assert q.requires_grad
        assert q.placements == (Shard(0), R)
        r = torch.nn.Parameter(
            distribute_tensor(torch.ones(4), mesh22(), [Shard(0)]), requires_grad=False
        )
        assert not r.requires_grad

    simulate(on_rank, 4)


def test_meta_tensors_stay_on_meta():
    def on_rank():
        with CommLog() as log:
            d = distribute_tensor(torch.empty(5, 4, device="meta"), mesh22(), [Shard(0)])
        assert not log.events
        assert d.device.type == "meta"
        assert d.shape == (5, 4)
        assert d.to_local().shape == d._spec.local_shape

    simulate(on_rank, 4)


def test_strides_are_kept():
    def on_rank():
        for x in (
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(3, 4).t(),
            torch.randn(6, 4)[::2],
            torch.randn(1, 4).expand(3, 4),
        ):
            for source in (0, None):
                d = distribute_tensor(
                    torch.zeros_like(x).copy_(x),
                    mesh22(),
                    [Shard(0), Shard(1)],
                    src_data_rank=source,
                )
                e = distribute_tensor(x, mesh22(), [Shard(0), Shard(1)], src_data_rank=source)
                dense = x.clone(memory_format=torch.preserve_format)
                assert d.stride() == e.stride() == dense.stride()
                assert torch.equal(e.full_tensor(), d.full_tensor())
                assert e.is_contiguous() == dense.is_contiguous()
                assert e.full_tensor().stride() == dense.stride()

    simulate(on_rank, 4)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.complex64],
)
def test_dtypes(dtype):
    x = torch.randint(0, 2, (3, 2)).to(dtype)

    def on_rank():
        for placements in ([Shard(0), Shard(1)], [R, Shard(0)], [R]):
            d = distribute_tensor(x, mesh22(), placements)
            assert d.dtype == dtype
            assert torch.equal(d.full_tensor(), x)

    simulate(on_rank, 4)


def test_small_and_empty_tensors():
    def on_rank():
        for shape in ((), (0,), (1,), (3, 0), (0, 4)):
            x = torch.ones(shape)
            for placements in (
                [R, R],
                [P],
                [Shard(0)] if shape else [R],
                [Shard(-1), Shard(-1)] if shape else [P, P],
            ):
                d = distribute_tensor(x, mesh22(), placements)
                assert d.full_tensor().shape == shape
                assert torch.equal(d.full_tensor(), x)

    simulate(on_rank, 4)


def test_what_is_left_out_is_replicated():
    def on_rank():
        x = torch.arange(4.0)
        assert distribute_tensor(x, mesh22()).placements == (R, R)
        assert distribute_tensor(x, mesh22(), [Shard(0)]).placements == (Shard(0), R)
        assert distribute_tensor(x, mesh22(), []).placements == (R, R)
        assert distribute_tensor(x).device_mesh.shape == (4,)
        assert distribute_tensor(x, placements=[Shard(-1)]).to_local().shape == (1,)

    simulate(on_rank, 4)


def test_a_dtensor_is_redistributed():
    def on_rank():
        d = distribute_tensor(torch.arange(4.0), mesh22(), [Shard(0)])
        assert distribute_tensor(d, mesh22(), [R, Shard(0)]).placements == (R, Shard(0))

    simulate(on_rank, 4)


def test_one_process_needs_no_launcher():
    d = distribute_tensor(torch.arange(3.0), placements=[Shard(0)])
    assert d.full_tensor().tolist() == [0, 1, 2]
    assert (d + 1).to_local().tolist() == [1, 2, 3]


def test_bad_input_raises_before_anything_is_sent():
    def on_rank():
        x = torch.zeros(4, 4)
        with CommLog() as log:
            with pytest.raises(
                LayoutError, match="src_data_rank 4 is not on a mesh of 4 ranks"
            ):
                distribute_tensor(x, mesh22(), [R], src_data_rank=4)
            with pytest.raises(LayoutError, match="src_data_rank -1"):
                distribute_tensor(x, mesh22(), [Shard(0)], src_data_rank=-1)
            with pytest.raises(LayoutError, match="Shard"):
                distribute_tensor(x, mesh22(), [Shard(2)])
        assert not log.events

    simulate(on_rank, 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_sparse_or_nested_is_refused():
    def on_rank():
        mesh = mesh22()
        sparse = torch.eye(4).to_sparse()
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        for call in (
            lambda: distribute_tensor(sparse, mesh, [R]),
            lambda: DTensor.from_local(torch.nn.Parameter(sparse), mesh, [Shard(0)]),
            lambda: torch.sparse.mm(sparse, x),
            lambda: sparse @ x,
            lambda: x + sparse.to_sparse_csr(),
        ):
            with pytest.raises(UnsupportedError, match=r"layout torch\.sparse"):
                call()

    simulate(on_rank, 4)
