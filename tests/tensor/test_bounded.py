"""Moves within a slab: values, gradients, refusals."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard, init_device_mesh, simulate
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.testing.sweep import lay_out

R, S, P = Replicate(), Shard, Partial()


MOVES = [
    ((4,), [S(0)], [S(1)]),
    ((4,), [S(1)], [R]),
    ((4,), [P], [R]),
    ((4,), [P], [S(1)]),
    ((4,), [S(0)], [S(0, owner=2)]),
    ((4,), [S(1, sizes=(1, 50, 0, 13))], [S(0)]),
    ((2, 2), [S(0), S(1)], [S(1), S(0)]),
    ((2, 2), [P, S(0)], [R, R]),
    ((2, 2), [S(0), R], [R, S(1)]),
    ((4,), [S(0)], [P]),
]


@pytest.mark.parametrize(("shape", "src", "dst"), MOVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_move_in_rounds_preserves_the_value(shape, src, dst, dtype):
    whole = torch.randint(-8, 8, (64, 64)).to(dtype)

    def check():
        mesh = init_device_mesh("cpu", shape)
        x = lay_out(whole, mesh, src)
        return x.redistribute(mesh, dst, max_extra_bytes=4096).full_tensor()

    assert all(torch.equal(full, whole) for full in simulate(check, 4))


def test_gradients_travel_in_rounds_too():
    whole = torch.randn(7, 9).double()

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        x = lay_out(whole, mesh, [S(0), S(1)]).requires_grad_()
        y = x.redistribute(mesh, [S(1), R], max_extra_bytes=64)
        (once,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
        return (once + twice).full_tensor().detach()

    want = 3 * whole**2 + 6 * whole
    assert all(torch.allclose(g, want) for g in simulate(check, 4))


def test_what_cannot_be_done_in_rounds_raises_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = lay_out(torch.randn(4, 4), mesh, [S(0), R])
        with pytest.raises(LayoutError, match="at least one"):
            x.redistribute(mesh, [R, R], max_extra_bytes=0)
        with pytest.raises(UnsupportedError):
            x.redistribute(mesh, [R, R], max_extra_bytes=64, async_op=True)
        with pytest.raises(UnsupportedError):
            x.redistribute(mesh["b"], [S(0)], max_extra_bytes=64)
        return True

    assert all(simulate(check, 4))


def test_meshes_exchange_in_rounds():
    whole = torch.randn(5, 6).double()

    def check():
        one = init_device_mesh("cpu", (4,))
        two = init_device_mesh("cpu", (2, 2))
        x = lay_out(whole, one, [S(0)]).requires_grad_()
        y = x.redistribute(two, [S(1), S(0)], max_extra_bytes=32)
        (y * y).sum().backward()
        return y.full_tensor().detach(), x.grad.full_tensor()

    for value, grad in simulate(check, 4):
        assert torch.equal(value, whole)
        assert torch.allclose(grad, 2 * whole)
