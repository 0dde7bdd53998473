"""Matrices and transforms: what is not worked on is cut without communication."""

from typing import Any
import warnings

import pytest
import torch
from torch import Tensor

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.simulate import simulate
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
L = torch.linalg


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def spd(*shape: int) -> Tensor:
    x = rand(*shape)
    return x @ x.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)


FLAG = 16  # two ranks learn each from the other whether some matrix was refused


@pytest.mark.parametrize(
    ("fn", "moved"),
    [
        (lambda a: L.cholesky(a + a.mT), FLAG),
        (L.inv, FLAG),
        (lambda a: L.eigh(a + a.mT)[0], FLAG),
        (L.svdvals, FLAG),
        (L.pinv, FLAG),
        (L.slogdet, 0),
        (torch.det, 0),
        (lambda a: L.qr(a)[1].abs(), 0),
        (lambda a: L.lu(a)[1:], 0),
        (lambda a: L.lu_factor(a)[0], FLAG),
        (lambda a: L.matrix_power(a, 3), 0),
        (lambda a: torch.matrix_exp(a / 8), 0),
        (torch.cholesky_inverse, 0),
        (lambda a: L.cross(a[..., :3], a[..., 1:]), 0),
        (L.vander, 0),
    ],
)
def test_one_matrix_is_one_rank_s(fn: Any, moved: int) -> None:
    x = spd(3, 4, 4)
    assert not sweep(fn, x, meshes=((4,), (2, 2)), extra=2)
    assert bytes_moved(fn, [x], (2,), ((S(0),),)) == moved


@pytest.mark.parametrize(
    ("fn", "moved"),
    [
        (L.solve, FLAG),
        (lambda a, b: L.solve_triangular(a, b, upper=True), 0),
        (lambda a, b: L.solve_triangular(a, b.mT, upper=True, left=False), 0),
        (lambda a, b: torch.cholesky_solve(b, a), 0),
        (lambda a, b: L.lstsq(a, b).solution, 0),
        (lambda a, b: L.lu_solve(*L.lu_factor(a), b), FLAG),
    ],
)
def test_solvers(fn: Any, moved: int) -> None:
    a, b = spd(3, 4, 4), rand(3, 4, 5)
    assert not sweep(fn, a, b, meshes=((4,), (2, 2)), extra=2)
    assert bytes_moved(fn, [a, b], (2,), ((S(0),), (S(0),))) == moved
    if not moved:  # right-hand sides of one matrix; of lu_factor the flag remains
        assert bytes_moved(fn, [a, b], (2,), ((R,), (S(2),))) == 0


def test_what_is_told_of_a_matrix_is_told_once() -> None:
    a, b = torch.diag(torch.tensor([1.0, 0.0])).double(), rand(2, 4)
    assert not sweep(lambda a, b: L.solve_ex(a, b)[1], a, b, grad=False)
    assert not sweep(
        lambda a, b: tuple(L.lstsq(a, b, driver="gelsy")),
        rand(2, 4, 3),
        rand(2, 4, 4),
        grad=False,
    )
    assert not sweep(torch.triangular_solve, b, spd(2, 2), meshes=[(2,)])


def test_solve_for_vectors() -> None:
    a, b = spd(5, 3, 3), rand(5, 3)
    assert not sweep(L.solve, a, b, meshes=((4,),), extra=2)
    assert not sweep(L.solve, a[0], b[0], meshes=((2,),), extra=2)


def test_a_matrix_cut_through_goes_to_whole_matrices() -> None:
    """Each rank gets some matrices whole, not all of them."""
    x = rand(8, 8, 8)
    once = 3 * x.numel() * 8 // 4
    assert bytes_moved(torch.det, [x], (4,), ((S(1),),)) == once
    assert bytes_moved(torch.fft.fft, [x], (4,), ((S(2),),)) == once


def test_where_one_rank_refuses_all_raise_the_same() -> None:
    x = spd(5, 2, 3, 3)
    x[3, 1] = -1.0

    def on_rank() -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in ([S(0), S(1)], [R, S(0)], [S(1), R], [S(0), S(0)]):
            with pytest.raises(L.LinAlgError, match="Batch element 7"):
                L.cholesky(distribute_tensor(x, mesh, placements))
        return "done"

    assert simulate(on_rank, 4) == ["done"] * 4


def test_products_of_vectors() -> None:
    assert not sweep(L.vecdot, rand(5, 3), rand(5, 3), meshes=((4,), (2, 2)))
    assert not sweep(lambda x, y: L.vecdot(x, y, dim=0), rand(5, 3), rand(5, 1), meshes=((2,),))
    assert not sweep(lambda x, y: torch.cross(x, y, -1), rand(5, 3), rand(5, 3), meshes=((4,),))
    assert bytes_moved(L.vecdot, [rand(4, 8)] * 2, (2,), ((S(1),), (S(1),))) == 0


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj())


@pytest.mark.parametrize("name", ["fft", "rfft", "fft2", "rfft2", "fftn", "ihfft"])
def test_transforms(name: str) -> None:
    fn = getattr(torch.fft, name)
    x = rand(3, 5, 4)
    assert not sweep(lambda x: real(fn(x)), x, meshes=((4,), (2, 2)), extra=2)
    if name != "fftn":
        assert bytes_moved(fn, [x], (2,), ((S(0),),)) == 0
        assert bytes_moved(fn, [x], (2,), ((P,),)) == 0


@pytest.mark.parametrize("name", ["irfft", "hfft", "irfft2"])
def test_transforms_to_real(name: str) -> None:
    fn = getattr(torch.fft, name)
    assert not sweep(lambda x: fn(x, norm="ortho"), rand(3, 5, 4), meshes=((4,),), extra=2)


def test_stft() -> None:
    window = torch.hann_window(8, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return real(torch.stft(x, 8, window=window, return_complex=True))

    assert not sweep(fn, rand(3, 40), meshes=((4,), (2, 2)), extra=2)
    assert bytes_moved(fn, [rand(3, 40)], (2,), ((S(0),),)) == 0


def test_right_hand_sides_of_which_a_rank_has_none() -> None:
    torch.manual_seed(0)
    b, a = torch.randn(4, 5).double(), torch.randn(4, 4).double()
    factor = torch.linalg.cholesky(a @ a.T + torch.eye(4))
    assert not sweep(torch.cholesky_solve, b, factor, meshes=((4,),), extra=1, twice=True)
    assert not bytes_moved(torch.cholesky_solve, [b, factor], (4,), ((S(1),), (R,)))
    lu, pivots = torch.linalg.lu_factor(a)
    assert not sweep(lambda b: L.lu_solve(lu, pivots, b), b, meshes=((4,),), extra=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks for linalg.lu_solve
        args, combo = [b, lu, pivots], ((S(1),), (R,), (R,))
        assert not sweep(torch.lu_solve, *args, meshes=((4,),), extra=1)
        assert not bytes_moved(torch.lu_solve, args, (4,), combo)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (L.cond, [(2, 3, 3)]),
        (L.householder_product, [(2, 3, 3), (2, 3)]),
        (lambda x: L.vander(x, N=3), [(2, 5)]),
    ],
)
def test_second_gradients_where_a_rank_has_no_matrix(
    fn: Any, shapes: list[tuple[int, ...]]
) -> None:
    args = [rand(*shape) for shape in shapes]
    assert not sweep(fn, *args, meshes=((4,),), extra=0, twice=True)
