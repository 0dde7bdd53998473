"""Clipping gradients, loss scaling, and parameters as one vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)

from shardwise import (
    CommLog,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    simulate,
)
from shardwise.comm.transport import current
from shardwise.program.spec import program_tables
from shardwise.testing.sweep import lay_out

R, S, P = Replicate(), Shard, Partial()
SHAPES = ((4, 6), (5, 3), (3, 7), (1, 5), (3,), (2, 3, 5), (), (6, 3))
PLACED = (
    (R, R),
    (S(0), R),
    (S(0), S(1)),
    (R, S(0)),
    (S(0), S(0)),
    (S(2), S(1)),
    (R, R),
    (S(0),),
)
INF = float("inf")


def values(seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in SHAPES]


def parameters(ts: list[Tensor], gs: list[Tensor] | None = None) -> list[Any]:
    """Parameters on a mesh, the last on its slice, with gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    out = []
    for k, (t, ps) in enumerate(zip(ts, PLACED)):
        p = nn.Parameter(
            distribute_tensor(t, mesh if len(ps) == 2 else mesh["b"], ps, src_data_rank=None)
        )
        if gs is not None:
            p.grad = distribute_tensor(gs[k], p.device_mesh, ps, src_data_rank=None)
        out.append(p)
    return out


def plain_parameters(ts: list[Tensor], gs: list[Tensor]) -> list[nn.Parameter]:
    out = [nn.Parameter(t.clone()) for t in ts]
    for p, g in zip(out, gs):
        p.grad = g.clone()
    return out


def assert_grads(params: list[Any], want: list[Any], tol: float = 1e-10) -> None:
    for p, w in zip(params, want):
        assert torch.allclose(p.grad.full_tensor(), w.grad, rtol=tol, atol=tol)
        assert p.grad.placements == p.placements


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", [2.0, 1.0, 3.0, INF])
def test_clip_grad_norm(foreach: bool | None, kind: float) -> None:
    plain = plain_parameters(values(), values(2))
    want = clip_grad_norm_(plain, 1.5, kind, foreach=foreach)

    def on_rank() -> None:
        for _ in range(2):
            params = parameters(values(), values(2))
            got = clip_grad_norm_(params, 1.5, kind, foreach=foreach)
            assert isinstance(got, DTensor)
            assert torch.allclose(got.full_tensor(), want)
            assert float(got) == pytest.approx(float(want))
            assert_grads(params, plain)

    simulate(on_rank, 4)


def test_small_norm_is_left_alone_and_one_tensor_is_taken() -> None:
    t, g = torch.randn(5, 3), torch.full((5, 3), 0.01)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        p = nn.Parameter(distribute_tensor(t, mesh, [S(0), S(1)]))
        p.grad = distribute_tensor(g, mesh, [S(0), S(1)])
        clip_grad_norm_(p, 1.0)
        assert torch.equal(p.grad.full_tensor(), g)
        assert clip_grad_norm_([nn.Parameter(distribute_tensor(t, mesh))], 1.0) == 0.0

    simulate(on_rank, 4)


@pytest.mark.parametrize("foreach", [None, False])
def test_total_norm_then_clip(foreach: bool | None) -> None:
    plain = plain_parameters(values(), values(2))
    want = get_total_norm([p.grad for p in plain], 2.0, foreach=foreach)
    clip_grads_with_norm_(plain, 0.5, want, foreach=foreach)

    def on_rank() -> None:
        params = parameters(values(), values(2))
        norm = get_total_norm([p.grad for p in params], 2.0, foreach=foreach)
        assert torch.allclose(norm.full_tensor(), want)
        clip_grads_with_norm_(params, 0.5, norm, foreach=foreach)
        assert_grads(params, plain)
        whole = parameters(values(), values(2))
        clip_grads_with_norm_(whole, 0.5, norm.full_tensor(), foreach=foreach)
        assert_grads(whole, plain)

    simulate(on_rank, 4)


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_value(foreach: bool | None) -> None:
    plain = plain_parameters(values(), values(2))
    clip_grad_value_(plain, 0.4, foreach=foreach)

    def on_rank() -> None:
        params = parameters(values(), values(2))
        clip_grad_value_(params, 0.4, foreach=foreach)
        assert_grads(params, plain)

    simulate(on_rank, 4)


@pytest.mark.parametrize("foreach", [None, False])
def test_non_finite_norm_raises_on_all_ranks(foreach: bool | None) -> None:
    def on_rank() -> None:
        gs = values(2)
        gs[2][0, 0] = INF
        params = parameters(values(), gs)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True, foreach=foreach)

    simulate(on_rank, 4)


@pytest.mark.parametrize("foreach", [None, False])
def test_pending_gradients_are_clipped_by_the_norm_of_their_sum(foreach: bool | None) -> None:
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    plain = nn.Parameter(w.clone())
    ((x @ plain) ** 2).sum().backward()
    want = clip_grad_norm_([plain], 1.0, foreach=foreach)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        p = nn.Parameter(distribute_tensor(w, mesh))
        rows = distribute_tensor(x, mesh, [S(0), S(0)], src_data_rank=None)
        with no_sync():
            ((rows @ p) ** 2).sum().backward()
        assert p.grad.placements == (P, P)
        assert torch.allclose(clip_grad_norm_([p], 1.0, foreach=foreach).full_tensor(), want)
        assert p.grad.placements == (P, P)
        assert torch.allclose(p.grad.full_tensor(), plain.grad)

    simulate(on_rank, 4)


def test_pending_gradients_on_top_of_reduced_ones() -> None:
    """What is written to ``.grad`` counts, also where it is a sum of a reduced and a pending part."""
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    plain = nn.Parameter(w.clone())
    for _ in range(2):
        ((x @ plain) ** 2).sum().backward()
    clip_grad_norm_([plain], 1.0)
    ((x @ plain) ** 2).sum().backward()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        p = nn.Parameter(distribute_tensor(w, mesh))
        rows = distribute_tensor(x, mesh, [S(0), S(0)], src_data_rank=None)
        ((rows @ p) ** 2).sum().backward()
        with no_sync():
            ((rows @ p) ** 2).sum().backward()
        clip_grad_norm_([p], 1.0)
        ((rows @ p) ** 2).sum().backward()
        assert p.grad.placements == (R, R)
        assert torch.allclose(p.grad.full_tensor(), plain.grad)

    simulate(on_rank, 4)


def test_clipping_needs_few_collectives_and_no_new_plans() -> None:
    def on_rank() -> list[int]:
        counts = []
        for k in range(4):
            params = parameters(values(), values(k))
            with CommLog() as log:
                clip_grad_norm_(params, 1.0 + k)
                clip_grad_value_(params, 0.5 + k)
            counts.append(sum(map(len, program_tables(current()))))
        assert log.count("all_reduce") == len(log.events) <= 3  # over (a), (b), (a, b)
        return counts

    counts = simulate(on_rank, 4)[0]
    assert len(set(counts[1:])) == 1, counts


def test_vector() -> None:
    ts = values()[:-1]
    want = parameters_to_vector([nn.Parameter(t.clone()) for t in ts])

    def on_rank() -> None:
        params = parameters(ts)
        layouts = [p.layout for p in params]
        vector = parameters_to_vector(params)
        assert torch.equal(vector.detach().full_tensor(), want)
        fresh = parameters([torch.zeros_like(t) for t in ts])
        for flat in (
            vector,
            distribute_tensor(want.detach(), vector.device_mesh, [S(0), S(0)]),
        ):
            ids = [id(p) for p in fresh]
            vector_to_parameters(flat, fresh)
            assert [id(p) for p in fresh] == ids
            assert [p.layout for p in fresh] == layouts
            for p, t in zip(fresh, ts):
                assert p.requires_grad
                assert torch.equal(p.detach().full_tensor(), t)
        loss = sum(((p * p).sum() for p in fresh), start=0.0)
        loss.backward()
        assert all(torch.allclose(p.grad.full_tensor(), 2 * t) for p, t in zip(fresh, ts))

    simulate(on_rank, 4)


@pytest.mark.parametrize(
    "form",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["loop", "foreach", "fused"],
)
def test_grad_scaler(form: dict[str, Any]) -> None:
    def run(params: list[Any], grads: Any) -> tuple[list[float], Any]:
        opt = torch.optim.AdamW(params, lr=0.1, **form)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        scales = []
        for step in range(4):
            loss = sum((p.sum() for p in params), start=0.0)
            scaler.scale(loss)
            grads(params, step, scaler.get_scale())
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, opt

    def gradients(step: int, scale: float) -> list[Tensor]:
        gs = [g * scale for g in values(step)]
        if step == 1:
            gs[2][2, 6] = INF  # on one rank only
        return gs

    def plain_grads(params: list[Any], step: int, scale: float) -> None:
        for p, g in zip(params, gradients(step, scale)):
            p.grad = g

    def placed_grads(params: list[Any], step: int, scale: float) -> None:
        for p, g in zip(params, gradients(step, scale)):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)

    plain = [nn.Parameter(t) for t in values()]
    want, _ = run(plain, plain_grads)
    assert want[1] < want[0]

    def on_rank() -> None:
        params = parameters(values())
        scales, _ = run(params, placed_grads)
        assert scales == want
        for p, w in zip(params, plain):
            assert torch.allclose(p.detach().full_tensor(), w.detach(), rtol=1e-9, atol=1e-9)

    simulate(on_rank, 4)


@pytest.mark.parametrize("bad", [None, INF, float("nan")])
def test_unscale_of_pending_gradients(bad: float | None) -> None:
    def on_rank(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2))
        g = torch.randn(4, 3)
        x = lay_out(g, mesh, (P, P))
        if bad is not None and rank == 2:
            x.to_local()[0, 0] = bad
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, torch.tensor(0.5))
        assert x.placements == (P, P)
        if bad is None:
            assert torch.allclose(x.full_tensor(), g * 0.5, atol=1e-5)
        return float(found)

    torch.manual_seed(0)
    assert simulate(on_rank, 4) == [0.0 if bad is None else 1.0] * 4


def test_unscale_moves_nothing_where_all_is_replicated() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.randn(4, 3), mesh)
        with CommLog() as log:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [x, x], torch.zeros(()), torch.tensor(0.5)
            )
        assert log.events == []

    simulate(on_rank, 4)
