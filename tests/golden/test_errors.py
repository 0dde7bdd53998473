"""What a wrong program is told: exact texts, the same on every rank, before anything is sent.

A message says what, with values; where: the call with its typed operands, and the user's line; and what to
try. ``EXPECTTEST_ACCEPT=1`` accepts new texts.
"""

from collections.abc import Callable
import re
from typing import Any

from expecttest import assert_expected_inline
import pytest
import torch
from torch import nn

import shardwise
from shardwise import (
    CommLog,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import ShardError

R, P = Replicate(), Partial()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def data(*placements: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return distribute_tensor(x, mesh(), placements or (Shard(0), Shard(1)), src_data_rank=None)


def elsewhere(shape: tuple[int, ...] = (6, 4)) -> DTensor:
    """A tensor on a mesh over the same ranks in another order."""
    other = DeviceMesh("cpu", [1, 0, 2, 3], mesh_dim_names=("pp",))
    return distribute_tensor(torch.zeros(shape), other, [R], src_data_rank=None)


def told(
    fn: Callable[..., Any], *, world: int = 4, prepare: Callable[[], Any] | None = None
) -> str:
    """The message that ``fn`` raises on every rank, its place shown as train.py:31.

    Args:
        fn: Takes the rank, and what ``prepare`` gives if there is one.
        world: Number of ranks.
        prepare: What may send something, because it is no part of the wrong call.
    """

    def on_rank(rank: int) -> str:
        given = () if prepare is None else (prepare(),)
        with CommLog() as log:
            try:
                fn(rank, *given)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            else:
                text = "nothing"
        sent = [event.kind for event in log.events if event.kind != "all_gather_object"]
        assert not sent, f"{sent} before {text}"
        return re.sub(r"\S*test_errors\.py:\d+", "train.py:31", text)

    texts = set(simulate(on_rank, world))
    assert len(texts) == 1, texts
    return texts.pop()


# ---- meshes and layouts -----------------------------------------------------------------------


def test_a_mesh_larger_than_the_world() -> None:
    assert_expected_inline(
        told(lambda rank: init_device_mesh("cpu", (3, 3))),
        """\
MeshError: a mesh of shape (3, 3) needs 9 ranks; the world has 4.
  try    - torchrun --nproc-per-node=9 ...
         - shardwise.simulate(fn, 9)""",
    )


def test_an_axis_that_does_not_exist() -> None:
    assert_expected_inline(
        told(lambda rank: data("pp")),
        """\
MeshError: the mesh has no axis "pp": DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     distribute_tensor(tensor: f32[4, 6] plain, device_mesh: (dp=2, tp=2) over ranks 0-3, placements: ('pp',))
  at     train.py:31""",
    )
    assert_expected_inline(
        told(lambda rank: mesh()["pp"]),
        """MeshError: the mesh has no axis "pp": DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).""",
    )
    assert_expected_inline(
        told(lambda rank: mesh().get_group(2)),
        """MeshError: axis 2 is out of range for a mesh with 2 axes: DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).""",
    )
    assert_expected_inline(
        told(lambda rank: data().redistribute(placements=(None, "pp"))),
        """\
MeshError: the mesh has no axis "pp": DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     DTensor.redistribute(x: f32[4, 6] {dp: S(0), tp: S(1)}, placements: (None, 'pp'))
  at     train.py:31""",
    )


def test_more_placements_than_axes() -> None:
    assert_expected_inline(
        told(lambda rank: data(R, R, Shard(0))),
        """\
LayoutError: 3 placements (R, R, S(0)) for a mesh with 2 axes: DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     distribute_tensor(tensor: f32[4, 6] plain, device_mesh: (dp=2, tp=2) over ranks 0-3, placements: (Replicate(), Replicate(), Shard(dim=0)))
  at     train.py:31""",
    )


def test_a_dim_that_does_not_exist() -> None:
    assert_expected_inline(
        told(lambda rank: data().redistribute(placements=[Shard(2)])),
        """\
LayoutError: Shard(dim=2) on a tensor with 2 dims (mesh axis dp).
  in     DTensor.redistribute(x: f32[4, 6] {dp: S(0), tp: S(1)}, placements: [Shard(dim=2)])
  at     train.py:31""",
    )
    assert_expected_inline(
        told(lambda rank: data().softmax(5)),
        """IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 5)""",
    )
    assert_expected_inline(
        told(lambda rank: data().sum(2)),
        """IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 2)""",
    )
    assert_expected_inline(
        told(lambda rank: data().cumsum(-3)),
        """IndexError: Dimension out of range (expected to be in range of [-2, 1], but got -3)""",
    )


def test_an_unknown_reduction() -> None:
    assert_expected_inline(
        told(lambda rank: Partial("mean")),
        """LayoutError: Partial does not know 'mean'; it knows sum, avg, max, min, product.""",
    )


def test_reductions_that_do_not_commute() -> None:
    assert_expected_inline(
        told(lambda rank: data(P, Partial("max"))),
        """\
LayoutError: pending reductions of different kinds do not commute: [P, P(max)] has no one value.
  in     distribute_tensor(tensor: f32[4, 6] plain, device_mesh: (dp=2, tp=2) over ranks 0-3, placements: (Partial(sum), Partial(max)))
  at     train.py:31""",
    )


def test_no_placements_at_all() -> None:
    assert_expected_inline(
        told(lambda rank: data(0, 1)),
        """\
LayoutError: not a placement: 0.
  in     distribute_tensor(tensor: f32[4, 6] plain, device_mesh: (dp=2, tp=2) over ranks 0-3, placements: (0, 1))
  at     train.py:31
  try    - Shard(dim), Replicate() or Partial(op)""",
    )
    assert_expected_inline(
        told(lambda rank: data().redistribute(placements=torch.zeros(2))),
        """\
LayoutError: placements must be placements, a spec or a layout, not a Tensor.
  in     DTensor.redistribute(x: f32[4, 6] {dp: S(0), tp: S(1)}, placements: f32[2] plain)
  at     train.py:31
  try    - x.placements
         - x.layout""",
    )


def test_meshes_that_cannot_be_combined() -> None:
    assert_expected_inline(
        told(lambda rank: data() @ elsewhere()),
        """\
MeshError: the operands live on meshes that cannot be combined: DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3)) is no slice of DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     Tensor.matmul(f32[4, 6] {dp: S(0), tp: S(1)}, f32[6, 4] {pp: R})
  at     train.py:31
  mesh   DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3)
         DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3))""",
    )
    assert_expected_inline(
        told(lambda rank: torch.cat([data(), elsewhere((4, 6))], dim=1)),
        """\
MeshError: the operands live on meshes that cannot be combined: DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3)) is no slice of DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     torch.cat([f32[4, 6] {dp: S(0), tp: S(1)}, f32[4, 6] {pp: R}], dim: 1)
  at     train.py:31
  mesh   DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3)
         DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3))""",
    )


def test_the_module_that_was_called() -> None:
    def net() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
        distribute_module(made[0], mesh())
        distribute_module(made[1], elsewhere().device_mesh)
        return made

    assert_expected_inline(
        told(lambda rank, made: made(data(Shard(0))), prepare=net),
        """\
MeshError: the operands live on meshes that cannot be combined: DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3)) is no slice of DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3).
  in     F.linear(f32[4, 6] {dp: S(0), tp: R}, f32[3, 6] {pp: R}, f32[3] {pp: R})
  at     train.py:31, module "1.1"
  mesh   DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3)
         DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3))""",
    )


# ---- local and plain tensors ------------------------------------------------------------------


def test_pieces_that_contradict_each_other() -> None:
    def pieces(rank: int) -> DTensor:
        local = torch.zeros(rank + 1)
        return DTensor.from_local(local, mesh(), [Shard(0), R])

    shown = [
        re.sub(r"f32\[\d\]", "f32[*]", text).replace("\n", "\n")
        for text in (told_by_rank(pieces, rank) for rank in range(4))
    ]
    assert len(set(shown)) == 1
    assert_expected_inline(
        shown[0],
        """\
LayoutError: the pieces contradict each other: rank 0 gave shape (1,); of a tensor of shape (4,) its piece would be (2,) (pieces are cut as torch.chunk cuts).
  in     DTensor.from_local(local: f32[*] plain, device_mesh: (dp=2, tp=2) over ranks 0-3, placements: [Shard(dim=0), Replicate()])
  at     train.py:31
  try    - Shard(dim, sizes=...): what each rank holds""",
    )


def told_by_rank(fn: Callable[[int], Any], rank: int) -> str:
    """What one rank is told, where the operands differ between ranks."""

    def on_rank(mine: int) -> str:
        with pytest.raises(ShardError) as caught:
            fn(mine)
        return re.sub(
            r"\S*test_errors\.py:\d+", "train.py:31", f"{caught.type.__name__}: {caught.value}"
        )

    return simulate(on_rank, 4)[rank]


def test_replicas_that_differ() -> None:
    def replicas(rank: int) -> DTensor:
        return DTensor.from_local(torch.full((3,), float(rank)), mesh())

    assert_expected_inline(
        told(replicas),
        """\
LayoutError: rank 1 holds other values than rank 0, but the placements say that they are replicas.
  in     DTensor.from_local(local: f32[3] plain, device_mesh: (dp=2, tp=2) over ranks 0-3)
  at     train.py:31
  try    - Shard(dim) if the ranks hold different pieces, Partial() if they hold addends
         - run_check=False, if the difference is meant""",
    )


def test_plain_tensors_that_differ() -> None:
    assert_expected_inline(
        told(lambda rank: data() + torch.full((6,), float(rank))),
        """\
LayoutError: add: tensor argument 1: a plain tensor next to a DTensor counts as replicated, but its values differ between ranks.
  in     Tensor.add(f32[4, 6] {dp: S(0), tp: S(1)}, f32[6] plain)
  at     train.py:31
  try    - DTensor.from_local(x, mesh, placements) if every rank has its own piece
         - distribute_tensor(x, mesh) to take the first rank's values everywhere""",
    )


def test_plain_tensors_in_strict_mode() -> None:
    def strictly(rank: int) -> DTensor:
        with shardwise.strict():
            return data() + torch.ones(6)

    assert_expected_inline(
        told(strictly),
        """\
StrictError: add: argument 1 is a plain tensor next to a DTensor, which strict() forbids.
  in     Tensor.add(f32[4, 6] {dp: S(0), tp: S(1)}, f32[6] plain)
  at     train.py:31
  try    - distribute_tensor(x, mesh, placements) if every rank has the whole tensor
         - DTensor.from_local(x, mesh, placements) if every rank has its own piece""",
    )


def test_a_fallback_in_strict_mode() -> None:
    def strictly(rank: int) -> DTensor:
        with shardwise.strict():
            return torch.pdist(data(shape=(4, 4)))

    assert_expected_inline(
        told(strictly),
        """\
StrictError: pdist: no rule for aten._pdist_forward.default in this layout, and strict() forbids to gather.
  in     F.pdist(f32[4, 4] {dp: S(0), tp: S(1)})
  at     train.py:31
  try    - redistribute the operand to Replicate() first, if the gather is meant""",
    )


# ---- shapes -----------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_although_the_pieces_would() -> None:
    assert_expected_inline(
        told(lambda rank: data() @ data()),
        """RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x6 and 4x6)""",
    )
    assert_expected_inline(
        told(lambda rank: data() + data(shape=(2, 6))),
        """RuntimeError: Attempting to broadcast a dimension of length 2 at -2! Mismatching argument at index 1 had (2, 6); but expected shape should be broadcastable to [4, 6]""",
    )
    assert_expected_inline(
        told(
            lambda rank: nn.functional.linear(
                data(R, Shard(1)), data(R, Shard(1), shape=(3, 4))
            )
        ),
        """RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x6 and 4x3)""",
    )


def test_results_that_cannot_be_kept_in_place() -> None:
    assert_expected_inline(
        told(lambda rank: data(shape=(4, 1)).add_(data())),
        """RuntimeError: output with shape [4, 1] doesn't match the broadcast shape [4, 6]""",
    )
    assert_expected_inline(
        told(lambda rank: data(R, Shard(0)).long().mul_(data(Shard(0)))),
        """RuntimeError: result type torch.float32 can't be cast to the desired output type torch.int64""",
    )
    assert_expected_inline(
        told(lambda rank: data().resize_(24)),
        """\
UnsupportedError: resize_ to (24,) works on memory, which a DTensor has in pieces.
  in     Tensor.resize_(f32[4, 6] {dp: S(0), tp: S(1)}, 24)
  at     train.py:31
  try    - reshape, expand or slices, which return a new tensor""",
    )


def test_out_that_cannot_hold_the_result() -> None:
    assert_expected_inline(
        told(lambda rank: torch.add(data(), 1, out=torch.zeros(4, 6))),
        """\
LayoutError: out= next to DTensors must be a DTensor.
  in     torch.add(f32[4, 6] {dp: S(0), tp: S(1)}, 1, out: f32[4, 6] plain)
  at     train.py:31
  try    - out=shardwise.empty(shape, device_mesh=mesh)""",
    )
    assert_expected_inline(
        told(lambda rank: torch.add(data(), 1, out=data(shape=(2, 6)))),
        """\
LayoutError: out= has shape (2, 6), the result (4, 6)
  in     torch.add(f32[4, 6] {dp: S(0), tp: S(1)}, 1, out: f32[2, 6] {dp: S(0), tp: S(1)})
  at     train.py:31""",
    )


# ---- memory -----------------------------------------------------------------------------------


def test_memory_in_pieces() -> None:
    assert_expected_inline(
        told(lambda rank: data().data_ptr()),
        """\
AliasError: data_ptr() would be that of one piece.
  in     Tensor.data_ptr(self: f32[4, 6] {dp: S(0), tp: S(1)})
  at     train.py:31
  try    - x.to_local().data_ptr(): this rank's piece""",
    )
    assert_expected_inline(
        told(lambda rank: data(P, R).numpy()),
        """\
AliasError: numpy() would alias one piece.
  in     Tensor.numpy(self: f32[4, 6] {dp: P, tp: R})
  at     train.py:31
  try    - x.full_tensor().numpy(): the whole value
         - x.to_local().numpy(): this rank's piece""",
    )
    assert_expected_inline(
        told(lambda rank: data().untyped_storage()),
        """\
UnsupportedError: the storage of f32[4, 6] {dp: S(0), tp: S(1)} is in pieces.
  in     Tensor.untyped_storage(f32[4, 6] {dp: S(0), tp: S(1)})
  at     train.py:31
  try    - x.to_local() for this rank's piece
         - x.full_tensor() for the whole value""",
    )
    assert_expected_inline(
        told(lambda rank: data().apply_(abs)),
        """\
UnsupportedError: apply_ works on memory, which a DTensor has in pieces.
  in     Tensor.apply_(f32[4, 6] {dp: S(0), tp: S(1)}, abs)
  at     train.py:31
  try    - x.to_local()""",
    )


def test_a_write_into_a_view_that_is_no_alias_is_never_lost() -> None:
    """It reaches the base, or raises."""
    plain = torch.arange(24.0).reshape(4, 6)
    views: list[Callable[[Any], Any]] = [
        lambda t: t[1],
        lambda t: t[0:3],
        lambda t: t[:, 1:4],
        lambda t: t.view(24),
        lambda t: t.view(2, 12)[1],
        lambda t: t.t()[2],
        lambda t: t.diagonal(),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.reshape(3, 8)[1:],
    ]

    def on_rank() -> int:
        kept = 0
        for view in views:
            want, got = plain.clone(), data()
            try:
                view(got).mul_(-2)
            except ShardError:
                assert torch.equal(got.full_tensor(), plain)
                continue
            view(want).mul_(-2)
            assert torch.equal(got.full_tensor(), want)
            kept += 1
        return kept

    assert len(set(simulate(on_rank, 4))) == 1


def test_a_write_into_a_view_whose_elements_overlap() -> None:
    assert_expected_inline(
        told(lambda rank, seen: seen.add_(1), prepare=lambda: data().unfold(0, 2, 1)),
        """\
AliasError: unfold needed communication here, so its result is a copy, and as its elements overlap the write cannot be brought to the base.
  in     Tensor.add_(f32[3, 6, 2] {dp: S(0), tp: S(1)}, 1)
  at     train.py:31
  try    - write into the base: x[index] = value
         - clone() the view, if the base is to stay""",
    )


# ---- gradients --------------------------------------------------------------------------------


def test_gradients() -> None:
    def doubled() -> DTensor:
        return data().requires_grad_() * 2

    assert_expected_inline(
        told(lambda rank: doubled().backward()),
        """\
GradientError: grad can be implicitly created only for scalar outputs, not for shape (4, 6).
  in     torch.autograd.backward(tensors: [f32[4, 6] {dp: S(0), tp: S(1)}])
  at     train.py:31
  try    - reduce it first: x.sum().backward()
         - pass a gradient of the same shape""",
    )
    assert_expected_inline(
        told(lambda rank: doubled().backward(data(shape=(2, 6)))),
        """\
LayoutError: a gradient of shape (2, 6) for a tensor of shape (4, 6)
  in     torch.autograd.backward(tensors: [f32[4, 6] {dp: S(0), tp: S(1)}], grad_tensors: f32[2, 6] {dp: S(0), tp: S(1)})
  at     train.py:31""",
    )
    assert_expected_inline(
        told(lambda rank: doubled().backward(elsewhere((4, 6)))),
        """\
MeshError: a layout on DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3)) cannot be read on DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3): it is no slice of it.
  in     torch.autograd.backward(tensors: [f32[4, 6] {dp: S(0), tp: S(1)}], grad_tensors: f32[4, 6] {pp: R})
  at     train.py:31
  mesh   DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3)
         DeviceMesh(cpu: (pp=4) over ranks (1, 0, 2, 3))""",
    )
    assert_expected_inline(
        told(lambda rank: data().sum().backward()),
        """RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn""",
    )


def test_gradients_that_are_set() -> None:
    def assign(value: Callable[[], Any]) -> Callable[[int], None]:
        def on_rank(rank: int) -> None:
            x = data().requires_grad_()
            x.grad = value()

        return on_rank

    assert_expected_inline(
        told(assign(lambda: torch.zeros(4, 6))),
        """\
LayoutError: the gradient of a DTensor must be a DTensor.
  in     Tensor.grad = value(self: f32[4, 6] {dp: S(0), tp: S(1)}, value: f32[4, 6] plain)
  at     train.py:31
  try    - x.grad = distribute_tensor(g, x.device_mesh, x.layout)""",
    )
    assert_expected_inline(
        told(assign(lambda: data(shape=(2, 6)))),
        """\
LayoutError: a gradient of shape (2, 6) for a tensor of shape (4, 6).
  in     Tensor.grad = value(self: f32[4, 6] {dp: S(0), tp: S(1)}, value: f32[2, 6] {dp: S(0), tp: S(1)})
  at     train.py:31""",
    )
    assert_expected_inline(
        told(assign(lambda: data().double())),
        """\
LayoutError: a gradient of torch.float64 for a tensor that takes torch.float32.
  in     Tensor.grad = value(self: f32[4, 6] {dp: S(0), tp: S(1)}, value: f64[4, 6] {dp: S(0), tp: S(1)})
  at     train.py:31
  try    - x.grad = g.to(x.dtype)""",
    )


def test_an_in_place_call_on_a_leaf() -> None:
    assert_expected_inline(
        told(lambda rank: data().requires_grad_().add_(1)),
        """RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.""",
    )


def test_no_number() -> None:
    assert_expected_inline(
        told(lambda rank: data().item()),
        """\
ShardError: item() of a tensor of shape (4, 6): only one element can be a number.
  in     Tensor.item(self: f32[4, 6] {dp: S(0), tp: S(1)})
  at     train.py:31""",
    )


def test_every_error_is_of_the_tree_and_of_a_builtin_kind() -> None:
    for kind in vars(shardwise.errors).values():
        if isinstance(kind, type) and issubclass(kind, ShardError) and kind is not ShardError:
            assert not issubclass(kind, TypeError)
            assert issubclass(
                kind, (ValueError, RuntimeError)
            )  # NotImplementedError is a RuntimeError


@pytest.mark.parametrize(
    "fix",
    [
        lambda rank: DTensor.from_local(torch.full((6,), float(rank)), mesh(), [P, P]) + data(),
        lambda rank: distribute_tensor(torch.full((6,), float(rank)), mesh()) + data(),
        lambda rank: data().full_tensor().numpy(),
        lambda rank: data().to_local().numpy(),
        lambda rank: data().to_local().data_ptr(),
        lambda rank: (data().requires_grad_() * 2).sum().backward(),
        lambda rank: (data().requires_grad_() * 2).backward(data(P, R)),
        lambda rank: torch.add(data(), 1, out=shardwise.empty(4, 6, device_mesh=mesh())),
        lambda rank: setattr(
            data(), "grad", distribute_tensor(torch.zeros(4, 6), mesh(), data().layout)
        ),
    ],
)
def test_what_a_message_says_to_try_works(fix: Callable[[int], Any]) -> None:
    simulate(fix, 4)
