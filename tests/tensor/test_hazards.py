"""Silent faults of earlier designs of such a library, each with the program that showed it.

A test runs the same lines on one device and on virtual ranks and compares everything that they return.
"""

import contextlib
import gc
import math
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    rng,
    simulate,
)
from shardwise.errors import UnsupportedError
from shardwise.events import FallbackEvent, observe

R, S, P = Replicate(), Shard, Partial()
MESHES = ((2,), (4,), (2, 2))


def lay(t, mesh, *placements):
    """``t`` on the mesh; on no mesh a plain copy."""
    if mesh is None:
        return t.detach().clone().requires_grad_(t.requires_grad)
    return distribute_tensor(t, mesh, placements[: mesh.ndim])


def leaves(value):
    if isinstance(value, (tuple, list)):
        return [leaf for x in value for leaf in leaves(x)]
    return [value]


def plain(x):
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def agrees(program, meshes=MESHES, tol=1e-9):
    """``program(mesh)`` gives on every mesh and rank what ``program(None)`` gives."""
    torch.manual_seed(0)
    want = [plain(x) for x in leaves(program(None))]

    def on_rank(rank, shape):
        torch.manual_seed(0)
        with rng(like="torch"):
            return [plain(x) for x in leaves(program(init_device_mesh("cpu", shape)))]

    for shape in meshes:
        for rank, got in enumerate(simulate(on_rank, math.prod(shape), shape)):
            assert len(got) == len(want)
            for i, (g, w) in enumerate(zip(got, want)):
                where = f"mesh {shape}, rank {rank}, result {i}"
                if not isinstance(w, torch.Tensor):
                    assert g == w, where
                    continue
                assert (g.shape, g.dtype) == (w.shape, w.dtype), where
                assert torch.allclose(g, w, rtol=tol, atol=tol, equal_nan=True), where


def double(*shape, **more):
    return torch.randn(*shape, dtype=torch.float64, **more)


# ---- what a piece looks like is not what the tensor looks like -----------------------------------


def test_shapes_are_those_of_the_whole():
    def program(mesh):
        x = lay(double(4, 3), mesh, S(0), S(1)).requires_grad_()
        target = lay(double(4, 3).softmax(-1), mesh, S(0))
        w = lay(double(4, 3), mesh, S(1), S(0))
        thin = lay(double(4, 1, 2), mesh, S(0), S(2))
        loss = F.kl_div(x.log_softmax(-1), target, reduction="batchmean")
        loss.backward()
        flat = lay(double(12), mesh, S(0))
        row = lay(double(3), mesh, S(0))
        return [
            loss, x.grad, flat.view_as(w), flat.view(-1, 3), row.expand_as(w), thin.squeeze(), thin.view(4, -1),
            x.numel(), thin.squeeze(0), x.mean(), x.std(), x.var(0), x.nelement(), x.size(0), len(x),
            F.mse_loss(x, w), x.reshape(-1).shape[0], x.unflatten(0, (2, -1)), torch.numel(x),
        ]  # fmt: skip

    agrees(program)


def test_programs_differ_with_what_requires_grad():
    def program(mesh):
        out = []
        for grad in (False, True, False):
            w = lay(double(7, 4), mesh, S(0)).requires_grad_(grad)
            ids = lay(torch.tensor([[0, 2], [6, 1]]), mesh, S(0))
            out.append(F.embedding_bag(ids, w))
            q = lay(double(2, 2, 3, 4), mesh, S(0), S(1))
            mask = lay(double(3, 3), mesh, R, S(0)).requires_grad_(grad)
            out.append(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
            a, b = (
                lay(double(3, 4), mesh, S(0)).requires_grad_(grad),
                lay(double(2, 4, 3), mesh, S(0)),
            )
            out.append(a @ b)
            if grad:
                sum(o.pow(2).sum() for o in out[-3:]).backward()
                out += [w.grad, mask.grad, a.grad]
        return out

    agrees(program)


def test_programs_differ_with_which_arguments_are_one_object():
    def program(mesh):
        torch.manual_seed(1)
        attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        if mesh is not None:
            attention = distribute_module(attention, mesh)
        x, y, z = (lay(double(2, 3, 4), mesh, S(0)) for _ in range(3))
        calls = [(x, x, x), (x, y, y), (x, y, z), (y, y, y), (x, x, z)]
        return [attention(*call)[0] for call in calls]

    agrees(program)


def test_infinities_survive_moves():
    def program(mesh):
        x = lay(
            torch.tensor([[1.0, -math.inf], [math.inf, 2.0]], dtype=torch.float64), mesh, R
        ).requires_grad_()
        y = (
            x
            if mesh is None
            else x.redistribute(placements=[P] * mesh.ndim).redistribute(placements=[S(0)])
        )
        (y * y.detach()).sum().backward()
        scores = lay(double(4, 4), mesh, S(0), S(1)).masked_fill(
            lay(torch.ones(4, 4).triu(1).bool(), mesh), -math.inf
        )
        return (
            y,
            x.grad,
            scores.softmax(-1),
            scores.softmax(-1) @ lay(double(4, 2), mesh, S(0), S(1)),
            scores.amax(0),
        )

    agrees(
        program, ((2,), (4,))
    )  # where the loss is replicated some ranks seed zeros, and inf * 0 is NaN


def test_writes_through_views_and_hidden_writes():
    def program(mesh):
        x = lay(double(8, 3), mesh, S(0), S(1))
        x[1:6] = 5.0
        x[0] += 1
        x[:, 1].mul_(2)
        x.select(0, 2).zero_()
        x.narrow(0, 5, 2).add_(3)
        x.t()[2].fill_(7)
        x.diagonal().copy_(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        torch.manual_seed(1)
        out = [x]
        for affine in ([R, R], [S(0), R], [R, S(0)]):
            norm = nn.BatchNorm1d(4).double()
            if mesh is not None:
                for name, t in [*norm.named_parameters(), *norm.named_buffers()]:
                    home = norm._parameters if name in norm._parameters else norm._buffers
                    to = affine if t.ndim else [R, R]
                    new = distribute_tensor(t.detach(), mesh, to[: mesh.ndim])
                    home[name] = nn.Parameter(new) if home is norm._parameters else new
            for _ in range(2):
                out.append(norm(lay(double(6, 4), mesh, S(0), S(1))))
            out += [norm.running_mean, norm.running_var, norm.num_batches_tracked]
        return out

    agrees(program)


# ---- keys -----------------------------------------------------------------------------------------


def test_arguments_that_hash_alike_are_told_apart():
    def program(mesh):
        x = lay(torch.arange(12.0, dtype=torch.float64).view(4, 3), mesh, S(0), S(1))
        i, j = (lay(torch.tensor(n), mesh) for n in ([0, 1], [2, 0]))
        out = []
        for _ in range(2):
            out += [
                x + 1,
                x + True,
                x + 1.0,
                i + 1,
                i + True,
                i + 1.0,
                i * 2,
                i * 2.0,
                i**2,
                i**2.0,
                x**1,
                x**True,
            ]
            out += [
                torch.full_like(x, 1),
                torch.full_like(x, True),
                torch.full_like(x, 0.0).signbit(),
            ]
            out += [
                torch.full_like(x, -0.0).signbit(),
                (x * 0).mul(-0.0).signbit(),
                (x * 0).mul(0.0).signbit(),
            ]
            out += [
                x.sum(0),
                x.sum(0, True),
                x.sum((0,)),
                x.sum([0]),
                x.sum(0, keepdim=True),
                x[1],
                x[True],
                x[1:2],
            ]
            out += [x[(i, j)], x[0, 1], x[[0, 1]], x[0:2, 1], x[None, 0], x[..., 1], x[:, True]]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a list as a tuple is on its way out
                out.append(x[[i, j]])
            out += [
                torch.cat([x, x]),
                torch.cat((x, x)),
                torch.cat([x, x], 1),
                x.std(),
                x.std(0),
                x.std(0, False),
            ]
            out += [
                x.clamp(0, 5),
                x.clamp(0.0, 5.0),
                x.clamp(None, 5),
                x.clamp(max=7, min=2),
                x.clamp(min=7, max=9),
            ]
            out += [
                x.norm(0),
                x.norm(1),
                x.norm(True),
                x.norm(),
                x.norm(2, 0),
                x.round(decimals=1),
                x.round(),
            ]
        return out

    agrees(program)


def tables(x):
    return [len(t) for t in x._spec.transport.state["programs"]]


def test_numbers_that_change_make_no_programs():
    def program():
        x = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (2,)), [S(0)])
        sizes = []
        for n in range(20):
            rate = 0.1 + 0.01 * n
            x.mul(rate).add(x, alpha=rate).addcmul(x, x, value=rate).lerp(x, rate).clamp(
                min=-rate
            )
            x.masked_fill(x > 0, float("nan"))
            torch.where(x > rate, x, rate)
            x.add(float("nan"))
            sizes.append(tables(x))
        assert sizes[1] == sizes[-1]

    simulate(program, 2)


def test_program_tables_are_bounded(monkeypatch):
    monkeypatch.setattr("shardwise.tensor.dispatch.MAX_PROGRAMS", 50)

    def program():
        mesh = init_device_mesh("cpu", (2,))
        for n in range(2, 200):
            x = distribute_tensor(torch.ones(n), mesh, [S(0)])
            assert (x * 2).sum().item() == 2 * n
            torch.linalg.vector_norm(x, ord=1)
            assert max(tables(x)) <= 52

    simulate(program, 2)


def test_modes_are_part_of_the_key():
    def program(mesh):
        x, w = lay(torch.randn(6, 4), mesh, S(0), S(1)), lay(torch.randn(4, 4), mesh, S(1), R)
        out = []
        for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16, torch.float16):
            with (
                torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()
            ):
                y = x @ w
                parts = (y.float() @ w).split(2, dim=1)
                named = torch.max(x @ w, dim=1)
                got = [
                    y,
                    y.softmax(-1),
                    y + y.float(),
                    *parts,
                    parts[0] * 2,
                    *torch.var_mean(y),
                    named.values,
                ]
                got += [
                    torch.einsum("ij,kj->ik", y, y.float()),
                    torch.einsum("ij,jk", x, w),
                    F.layer_norm(y, (4,)),
                ]
            out += [t.dtype for t in got]
        with torch.inference_mode():
            out.append((x @ w + 1).is_inference())
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                count = lay(torch.arange(4), mesh, S(0))
                out += [
                    (count / 2).dtype,
                    (count * 2.0).dtype,
                    count.sqrt().dtype,
                    torch.full_like(count, 1).dtype,
                ]
            finally:
                torch.set_default_dtype(torch.float32)
        return out

    agrees(program, ((2,), (3,), (4,), (2, 2)))


def test_autocast_on_a_rank_without_rows():
    """Torch takes another LSTM kernel for an empty batch, whose results have another dtype."""

    def program(mesh):
        torch.manual_seed(1)
        lstm = nn.LSTM(4, 5, 2, batch_first=True)
        if mesh is not None:
            lstm = distribute_module(lstm, mesh)
        out = []
        for dtype in (torch.bfloat16, None, torch.bfloat16):
            with (
                torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()
            ):
                y, (h, c) = lstm(lay(torch.randn(6, 3, 4), mesh, S(0)))
            y.float().sum().backward()
            out += [y.dtype, h.dtype, c.dtype, y.shape]
        return [*out, lstm.weight_ih_l0.grad]

    agrees(program, ((2,), (4,)), tol=1e-2)


# ---- calls that look at values ----------------------------------------------------------------------


def test_calls_that_depend_on_data():
    def program(mesh):
        x = lay(
            torch.tensor([[1.0, -2, 3], [0, 5, -6], [7, 0, 9], [1, 1, 1]], dtype=torch.float64),
            mesh,
            S(0),
            S(1),
        )
        n = lay(torch.tensor([0, 2, 1, 2]), mesh, S(0))
        two = lay(torch.tensor(2.0, dtype=torch.float64), mesh)
        at = lay(torch.tensor(1), mesh)
        out = [
            torch.cov(x),
            5.0 in x,
            4.0 in x,
            x.add(x, alpha=two.item()),
            x[at],
            x[x > 0],
            F.one_hot(n),
        ]
        out += [
            x.repeat_interleave(n, dim=0),
            x.nonzero(),
            torch.unique(n),
            torch.unique(n, return_counts=True),
        ]
        out += [
            x.masked_select(x < 2),
            torch.bincount(n),
            torch.histc(x),
            x.nonzero(as_tuple=True),
            x[n],
            x[n, 1],
        ]
        out += [
            torch.equal(x, x),
            torch.allclose(x, x + 1e-12),
            x.item() if x.numel() == 1 else 0,
        ]
        return out

    agrees(program)


def test_pieces_without_elements():
    """Calls that torch refuses (or that crash) on an empty tensor, where some ranks hold nothing."""

    def program(mesh):
        x = lay(double(1, 8), mesh, S(0), R).requires_grad_()
        z = lay(double(1, 8), mesh, S(0), S(0))
        image = lay(double(1, 4, 2, 2), mesh, S(0), R).requires_grad_()
        out = [
            x.max(),
            x.min(),
            x.quantile(0.3),
            torch.fft.fft(x).abs(),
            torch.fft.rfft(z).abs(),
            x.view(1, -1),
        ]
        out += [
            F.pixel_shuffle(image, 2),
            torch.cdist(x, x),
            x.argmax(),
            x.amax(1),
            z.median(),
            x.logsumexp(0),
        ]
        out += [
            F.pdist(lay(double(3, 2), mesh, S(0), R)),
            x.std(1),
            z.cumprod(1),
            z.sort(1)[0],
            z.mode(1)[0],
        ]
        out += [
            F.layer_norm(x, (8,)),
            F.softmax(x, 0),
            torch.stft(z, 4, return_complex=True, window=None).abs(),
        ]
        F.pixel_shuffle(image, 2).pow(2).sum().backward()
        (x.max() + torch.fft.fft(x).abs().sum() + x.amax(1).sum()).backward()
        return [*out, image.grad, x.grad]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stft without a window
        agrees(program, ((4,), (2, 2)))


def test_failures_that_only_a_kernel_notices_are_not_lost():
    good, bad = torch.eye(3).expand(4, 3, 3).clone(), torch.eye(3).expand(4, 3, 3).clone()
    bad[2] = -torch.ones(3, 3)

    def program():
        mesh = init_device_mesh("cpu", (4,))
        for placement in (S(0), S(1), R):
            x, y = (distribute_tensor(t, mesh, [placement]) for t in (good, bad))
            for call in (
                torch.linalg.cholesky,
                torch.linalg.inv,
                lambda t: torch.linalg.solve(t, good[0]),
            ):
                call(x)
                with pytest.raises(torch.linalg.LinAlgError, match="Batch element 2"):
                    call(y)

    simulate(program, 4)


BAD_INDEX = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding_bag": lambda w, i: F.embedding_bag(i.view(2, 2), w),
    "cross_entropy": lambda w, i: F.cross_entropy(w.t()[:1].expand(4, 5), i),
    "nll_loss": lambda w, i: F.nll_loss(w.t()[:1].expand(4, 5), i),
    "gather": lambda w, i: w.gather(0, i.view(4, 1)),
    "index_select": lambda w, i: w.index_select(0, i),
    "getitem": lambda w, i: w[i],
    "setitem": lambda w, i: w.detach().clone().__setitem__(i, 1.0),
    "index_add": lambda w, i: w.index_add(0, i, w[:4]),
    "scatter": lambda w, i: w.scatter(0, i.view(4, 1), 1.0),
    "scatter_add": lambda w, i: w.scatter_add(0, i.view(4, 1), w),
    "index_put": lambda w, i: w.index_put((i,), torch.tensor(1.0), accumulate=True),
    "take": lambda w, i: w.view(-1).take(i * 3),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_bad_indices_raise_on_every_layout(name):
    call = BAD_INDEX[name]
    torch.manual_seed(0)
    w = torch.randn(5, 3)

    def program(rank, i, own, index):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(w, mesh, [own]).requires_grad_()
        y = call(x, distribute_tensor(i, mesh, [index]))
        return y.full_tensor() if isinstance(y, DTensor) else None

    for wrong in (5, -7):
        i = torch.tensor([0, 1, 2, wrong])
        with pytest.raises((IndexError, RuntimeError)):
            call(w, i)
        for own in (R, S(0), S(1)):
            for index in (R, S(0)):
                with pytest.raises((IndexError, RuntimeError)):
                    simulate(program, 2, i, own, index)


# ---- views, in place ----------------------------------------------------------------------------------


def test_a_view_that_moved_is_taken_again_after_its_base_has_changed():
    def program():
        x = distribute_tensor(
            torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (2,)), [S(0)]
        )
        row, alias = x[3], x[:, 1]
        x.add_(1)
        assert torch.equal((row + 0).full_tensor(), torch.arange(12.0).view(4, 3)[3] + 1)
        assert torch.equal(alias.full_tensor(), torch.arange(12.0).view(4, 3)[:, 1] + 1)

    simulate(program, 2)


def test_pending_sums_in_place_are_seen_by_aliases():
    def program(mesh):
        x, w = lay(double(3, 4), mesh, S(1), R), lay(double(4, 2), mesh, S(0), S(1))
        y = x @ w  # a pending sum
        alias = y[:]
        y.clamp_(-0.5, 0.5)
        z = x @ w
        z.relu_().add_(1)
        z += y
        z.mul_(2).pow_(2)
        return y, alias, z

    agrees(program)


def test_shape_changes_in_place():
    def program(mesh):
        x = lay(double(4, 1, 3), mesh, S(0), S(2))
        x.squeeze_(1).t_().unsqueeze_(0)
        return x, x + 1, x.shape, x.transpose_(1, 2) * 2, x.sum(1), x.view(4, 3)

    agrees(program)


# ---- autograd ------------------------------------------------------------------------------------------


def test_backward_that_raises_can_be_followed_by_another():
    def program(mesh):
        w, v = (lay(double(4, 4), mesh, to).requires_grad_() for to in (R, S(0)))
        h = lay(double(4, 4), mesh, S(0)) @ v
        failing = [True]

        def hook(g):
            if failing[0]:
                raise ValueError("in backward")

        h.register_hook(hook)
        loss = (h @ w).pow(2).sum()
        out = []
        for _ in range(2):
            with pytest.raises(ValueError, match="in backward"):
                loss.backward(retain_graph=True)
            out += [w.grad.clone(), v.grad]
            failing[0] = False
            loss.backward(retain_graph=True)
            out += [w.grad.clone(), v.grad.clone()]
            failing[0], w.grad, v.grad = True, None, None
        for _ in range(200):
            with contextlib.suppress(ValueError):
                loss.backward(retain_graph=True)
        if mesh is not None:
            assert len(w._spec.transport.state["pending_leaves"]) < 100
        return out

    agrees(program)


def test_a_gradient_cleared_inside_backward_stays_cleared():
    def program(mesh):
        w, v = (lay(double(4, 4), mesh, R).requires_grad_() for _ in range(2))
        h = lay(double(4, 4), mesh, S(0)) @ v
        h.register_hook(lambda g: setattr(w, "grad", None))
        (h @ w).sum().backward()
        return w.grad, v.grad

    agrees(program)


def test_everything_at_once():
    """Tied weights, mixed layouts, accumulation, hooks, both checkpoints, double backward, uneven batches."""

    def program(mesh):
        torch.manual_seed(1)
        embed, mid = nn.Embedding(11, 6).double(), nn.Linear(6, 6).double()
        if mesh is not None:
            for module, to in ((embed, [S(0), R]), (mid, [R, S(1)])):
                for name, p in list(module.named_parameters()):
                    placed = to if p.ndim > 1 else [R, S(0)]
                    module.register_parameter(
                        name,
                        nn.Parameter(distribute_tensor(p.detach(), mesh, placed[: mesh.ndim])),
                    )
        params = [*embed.parameters(), *mid.parameters()]
        optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-3)
        out = []
        mid.weight.register_hook(lambda g: g * 2)
        for step in range(2):
            optimizer.zero_grad()
            for part, batch in enumerate((5, 1)):
                ids = lay(torch.randint(0, 11, (batch, 3)), mesh, S(0), S(1))
                held = no_sync() if part == 0 and mesh is not None else contextlib.nullcontext()
                with held:
                    h = embed(ids)
                    h = checkpoint(lambda t: mid(t).tanh(), h, use_reentrant=bool(step))
                    logits = h @ embed.weight.t()
                    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
                    if step == 0:
                        (g,) = torch.autograd.grad(
                            logits.pow(2).mean(), embed.weight, create_graph=True
                        )
                        loss = loss + g.pow(2).sum()
                    loss.backward()
                    out.append(loss)
            out.append(nn.utils.clip_grad_norm_(params, 0.5))
            optimizer.step()
        return out + params

    agrees(program, ((2,), (3,), (2, 2)), tol=1e-7)


def test_ranks_outside_the_mesh_train_along():
    def program():
        mesh = DeviceMesh("cpu", [1, 3])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 2))
        for module in model:
            for name, p in list(module.named_parameters()):
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(p, mesh, [S(0)]))
                )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            x, y = (distribute_tensor(torch.randn(3, n), mesh, [S(0)]) for n in (4, 2))
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        p = model[0].weight
        assert not p.detach().requires_grad
        assert not (p > 0).requires_grad
        assert not p.argmax().requires_grad
        assert p.is_leaf
        x = distribute_tensor(torch.ones(4), mesh, [S(0)])
        assert [(t * 3).requires_grad for t in (x.requires_grad_(), x.detach())] == [
            True,
            False,
        ]
        y = distribute_tensor(torch.ones(4), mesh, [S(0)])
        assert not (y * 4).requires_grad
        y.requires_grad_()
        (y * 4).sum().backward()
        with torch.no_grad():
            assert not (y * 4).requires_grad
            y.mul_(2)
        return (p * 1).requires_grad

    assert simulate(program, 4) == [True] * 4


# ---- tools -------------------------------------------------------------------------------------------------


def test_modes_of_torch_see_nothing_of_the_compilation():
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    def program():
        mesh = init_device_mesh("cpu", (2,))
        x, w = (
            distribute_tensor(torch.randn(4, 8), mesh, [S(0)]),
            distribute_tensor(torch.randn(8, 8), mesh),
        )
        flops = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                F.linear(x, w)
                torch.linalg.matrix_norm(x @ w)
            flops.append(counter.get_total_flops())
        assert flops[0] == flops[1] == 2 * 2 * 2 * 8 * 8
        with Count(), torch.profiler.record_function("block"):
            F.linear(x, w)
        assert Count.calls
        with torch.device("meta"):
            for call in (
                lambda: x * 3,
                lambda: torch.linalg.matrix_norm(x),
                lambda: x.cov(),
                lambda: x.t() @ x,
            ):
                assert call().device.type == "cpu"

    simulate(program, 2)


def test_fallbacks_are_counted():
    def program():
        x = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (2,)), [S(0)])
        seen = []
        with observe(seen.append):
            F.pdist(x)
            F.pdist(x)
        return sum(isinstance(event, FallbackEvent) for event in seen)

    assert simulate(program, 2) == [2, 2]


def test_many_simulations_leave_nothing_behind():
    def program(rank, failing):
        mesh = init_device_mesh("cpu", (2, 2))
        w = distribute_tensor(torch.randn(4, 4, requires_grad=True), mesh, [R, S(1)])
        x = distribute_tensor(torch.randn(3, 4), mesh, [S(0)])
        F.layer_norm(x @ w, (4,)).pow(2).sum().backward()
        x[1:3], F.dropout(x), torch.linalg.svdvals(x)
        if rank == 2 and failing:
            raise ValueError("one rank fails")
        return w.grad.full_tensor()

    def run(times):
        for i in range(times):
            with contextlib.suppress(ValueError):
                simulate(program, 4, i % 2 == 1)
        gc.collect()
        return len(gc.get_objects())

    before = run(6)
    assert run(20) - before < 100


def test_a_trace_of_aten_calls_is_refused():
    """It would keep the pieces as constants: right for the traced arguments, silently wrong for others."""

    def program():
        mesh = init_device_mesh("cpu", (2,))
        x, model = (
            distribute_tensor(torch.arange(4.0), mesh, [S(0)]),
            distribute_module(nn.Linear(4, 2), mesh),
        )
        for fn, arg in (
            (lambda t: t * 2, x),
            (model, torch.ones(4)),
            (lambda d: d["x"] + 1, {"x": x}),
        ):
            with pytest.raises(UnsupportedError, match="make_fx"):
                make_fx(fn)(arg)
        assert make_fx(lambda t: t * 2)(torch.ones(2))(torch.zeros(2)).eq(0).all()

    simulate(program, 2)


def test_threads_compile_at_once():
    mesh, errors = init_device_mesh("cpu", (1,)), []

    def work(k):
        try:
            for n in range(2, 6):
                x = distribute_tensor(torch.randn(n, k + 2, requires_grad=True), mesh, [S(0)])
                (
                    F.huber_loss(x, x * 2)
                    + torch.linalg.matrix_norm(x @ x.t())
                    + torch.cdist(x, x).sum()
                ).backward()
                assert x.grad.shape == x.shape
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_simulation_inside_another():
    def inner(rank):
        w = distribute_tensor(
            torch.arange(3.0), init_device_mesh("cpu", (3,)), [S(0)]
        ).requires_grad_()
        w.pow(2).sum().backward()
        return w.grad.full_tensor().sum().item()

    def outer(rank):
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [S(0)])
        return simulate(inner, 3), x.sum().item(), torch.randn(1).item()

    torch.manual_seed(0)
    a, b = simulate(outer, 2)
    assert a == b == ([6.0] * 3, 4.0, a[2])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exit_on_one_rank_ends_all(kind):
    def program(rank):
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [S(0)])
        if rank:
            raise kind("now")
        with contextlib.suppress(Exception):  # a rank that swallows the abort is stopped again
            x.sum().item()
        return x.sum().item()

    with pytest.raises(kind):
        simulate(program, 2)


def test_the_import_is_quick_and_quiet(tmp_path):
    """With bytecode that is there already, as for whoever imports it a second time."""
    script = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); import shardwise, sys; "
        "print((time.process_time() - b) / (b - a)); assert 'torch._dynamo' not in sys.modules"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    shares = []
    while len(shares) < 4 and min(shares[1:], default=1.0) >= 0.27:  # the first one compiles
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        shares.append(float(done.stdout))
    assert min(shares[1:]) < 0.27, "of the time that torch takes"
