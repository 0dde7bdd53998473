"""Each pass on a small step: the text before and after. ``EXPECTTEST_ACCEPT=1`` accepts new texts."""

from __future__ import annotations

from functools import partial
import re
from typing import Any

from expecttest import assert_expected_inline
import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    Partial,
    Profile,
    Replicate,
    Shard,
    capture,
    distribute_tensor,
    init_device_mesh,
    parallel,
    simulate,
)
from shardwise.capture.cost import CPU
from shardwise.capture.ir import Step
from shardwise.capture.passes import (
    bucket,
    counts,
    in_place,
    redundant_moves,
    scale,
    schedule,
    simplify,
)
from shardwise.comm import DryTransport
from shardwise.comm.transport import current, use
from shardwise.tensor.dtensor import DTensor

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def on(mesh: Any, kind: Any, *shape: int) -> Any:
    return DTensor.from_local(torch.ones(shape), mesh, [kind], run_check=False)


def recorded(fn: Any, *kinds: Any, passes: Any = ()) -> Step:
    """The step of a function of matrices of 4 × 4, as rank 0 of 2 records it."""
    with use(DryTransport(0, 2)), torch.no_grad():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        shapes = {S0: (2, 4), S1: (4, 2)}
        xs = [on(mesh, k, *shapes.get(k, (4, 4))) for k in kinds]
        step = capture(fn, passes=passes)
        step(*xs)
        step(*xs)
        return step.last.step


def text(step: Step) -> str:
    """Without the inputs, and shorter."""
    lines = [str(n) for n in step.nodes] + [f"return {', '.join(map(repr, step.outputs))}"]
    return "\n".join(re.sub(r"aten\.(\w+)\.\w+", r"\1", line) for line in lines)


def to(x: Any, *kinds: Any) -> Any:
    return x.redistribute(placements=kinds)


def test_simplify() -> None:
    def fn(x: Any) -> Any:
        a, b = to(x, R), to(x, R)
        unused = x.exp()
        del unused
        return (a.t().t() + b).clone()

    step = recorded(fn, S0)
    assert_expected_inline(
        text(step),
        """\
%3 = move {dp: S(0)} -> {dp: R}(%0)  : f32[4, 4]
%6 = move {dp: S(0)} -> {dp: R}(%0)  : f32[4, 4]
%7 = exp(%0)  : f32[2, 4]
%8 = t(%3)  : f32[4, 4]
%9 = t(%8)  : f32[4, 4]
%10 = add(%9, %6)  : f32[4, 4]
%11 = clone(%10)  : f32[4, 4]
return %11""",
    )
    assert_expected_inline(
        text(simplify(step)),
        """\
%3 = move {dp: S(0)} -> {dp: R}(%0)  : f32[4, 4]
%10 = add(%3, %3)  : f32[4, 4]
return %10""",
    )


def test_redundant_moves() -> None:
    def fn(x: Any, p: Any, q: Any) -> Any:
        there = to(x, R)
        return to(there, S0) * 2, to(to(p, R), S0), to(to(q, R), S1)

    step = recorded(fn, S0, P, P)
    assert_expected_inline(
        text(step),
        """\
%3 = move {dp: S(0)} -> {dp: R}(%0)  : f32[4, 4]
%5 = move {dp: R} -> {dp: S(0)}(%3)  : f32[2, 4]
%6 = mul(%5, 2)  : f32[2, 4]
%9 = move {dp: P} -> {dp: R}(%7)  : f32[4, 4]
%11 = move {dp: R} -> {dp: S(0)}(%9)  : f32[2, 4]
%14 = move {dp: P} -> {dp: R}(%12)  : f32[4, 4]
%16 = move {dp: R} -> {dp: S(1)}(%14)  : f32[4, 2]
return %6, %11, %16""",
    )
    assert_expected_inline(
        text(redundant_moves(step)),
        """\
%3 = move {dp: S(0)} -> {dp: R}(%0)  : f32[4, 4]
%6 = mul(%0, 2)  : f32[2, 4]
%19 = move {dp: P} -> {dp: S(0)}(%7)  : f32[2, 4]
%24 = move {dp: P} -> {dp: S(1)}(%12)  : f32[4, 2]
return %6, %19, %24""",
    )


def test_counts() -> None:
    def fn(x: Any, y: Any) -> Any:
        return F.cross_entropy(x, y.argmax(1)).redistribute(placements=[R])

    step = recorded(fn, S0, S0)
    assert_expected_inline(
        text(step),
        """\
%1 = argmax(%0, 1)  : i64[2]
%3 = _log_softmax(%2, 1, False)  : f32[2, 4]
%4, %5 = nll_loss_forward(%3, %1, None, 2, -100)  : f32[], f32[]
%6 = start all_reduce sum over dp(%5)
%7 = wait(%6)  : f32[]
div_(%4, %7)
%9 = move {dp: P} -> {dp: R}(%4)  : f32[]
return %9""",
    )
    assert_expected_inline(
        text(counts(step)),
        """\
%1 = argmax(%0, 1)  : i64[2]
%3 = _log_softmax(%2, 1, False)  : f32[2, 4]
%10 = ne(%1, -100)  : b8[2]
%11 = sum(%10)  : i64[]
%12 = _to_copy(%11, dtype=float32)  : f32[]
%4, %13 = nll_loss_forward(%3, %1, None, 2, -100)  : f32[], f32[]
%6 = start all_reduce sum over dp(%12)
%7 = wait(%6)  : f32[]
div_(%4, %7)
%9 = move {dp: P} -> {dp: R}(%4)  : f32[]
return %9""",
    )


def test_views_of_what_has_travelled_together_are_not_the_same() -> None:
    """They are where they would be had each travelled alone, but in one memory."""

    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def fn(p: Any, q: Any, x: Any) -> Any:
            a, b = to(p, R), to(q, R)
            return a.t() @ x, b.t() @ x, a.view(-1)[:3], b.view(-1)[:3]

        p, q, x = (on(mesh, kind, 4, 4) * n for kind, n in ((P, 1), (P, 5), (R, 1)))
        step = capture(fn)
        for _ in range(3):
            for got, wanted in zip(step(p, q, x), fn(p, q, x), strict=True):
                assert torch.equal(got.full_tensor(), wanted.full_tensor())

    simulate(both, world_size=2)


def test_what_a_rank_does_not_need_for_a_move_it_may_need_without_it() -> None:
    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def fn(x: Any) -> Any:
            return to(to(x, P), R) * 2  # one rank holds zeros of the sum

        x = on(mesh, R, 4, 4)
        step = capture(fn)
        for _ in range(3):
            assert torch.equal(step(x).full_tensor(), fn(x).full_tensor())

    simulate(both, world_size=2)


def test_gathered_dims_of_one_travel_together() -> None:
    """What arrives has other strides in a bucket than alone, which a view must bear."""

    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        pieces = [torch.arange(4.0).view(1, 2, 2) * n for n in (1, 2)]
        x, y = (DTensor.from_local(p, mesh, [Shard(1)], run_check=False) for p in pieces)

        def fn(x: Any, y: Any) -> Any:
            whole = [to(t, R) for t in (x, y)]
            return tuple(t.view(-1) for t in whole)

        step = capture(fn)
        for _ in range(3):
            for got, wanted in zip(step(x, y), fn(x, y), strict=True):
                assert torch.equal(got.full_tensor(), wanted.full_tensor())

    simulate(both, world_size=2)


def test_bucket() -> None:
    def fn(p: Any, q: Any, s: Any, x: Any) -> Any:
        a, b, c = to(p, R), to(q, R), to(s, R)
        return a * 2, b, c, to(x, R)

    step = recorded(fn, P, P, P, S0)
    assert_expected_inline(
        text(step),
        """\
%2 = move {dp: P} -> {dp: R}(%0)  : f32[4, 4]
%5 = move {dp: P} -> {dp: R}(%3)  : f32[4, 4]
%8 = move {dp: P} -> {dp: R}(%6)  : f32[4, 4]
%9 = mul(%2, 2)  : f32[4, 4]
%13 = move {dp: S(0)} -> {dp: R}(%10)  : f32[4, 4]
return %9, %5, %8, %13""",
    )
    assert_expected_inline(
        text(bucket(step)),
        """\
%14 = view(%0, [-1])  : f32[16]
%15 = view(%3, [-1])  : f32[16]
%16 = view(%6, [-1])  : f32[16]
%17 = cat([%14, %15, %16])  : f32[48]
%18 = start all_reduce sum over dp(%17)
%19 = wait(%18)  : f32[48]
%20, %21, %22 = split_with_sizes(%19, [16, 16, 16], -1)  : f32[16], f32[16], f32[16]
%23 = view(%20, [4, 4])  : f32[4, 4]
%24 = view(%21, [4, 4])  : f32[4, 4]
%25 = view(%22, [4, 4])  : f32[4, 4]
%9 = mul(%23, 2)  : f32[4, 4]
%13 = move {dp: S(0)} -> {dp: R}(%10)  : f32[4, 4]
return %9, %24, %25, %13""",
    )
    step = recorded(fn, P, P, P, S0)
    assert_expected_inline(
        text(bucket(step, cap_bytes=128)),
        """\
%14 = view(%0, [-1])  : f32[16]
%15 = view(%3, [-1])  : f32[16]
%16 = cat([%14, %15])  : f32[32]
%17 = start all_reduce sum over dp(%16)
%18 = wait(%17)  : f32[32]
%19, %20 = split_with_sizes(%18, [16, 16], -1)  : f32[16], f32[16]
%21 = view(%19, [4, 4])  : f32[4, 4]
%22 = view(%20, [4, 4])  : f32[4, 4]
%8 = move {dp: P} -> {dp: R}(%6)  : f32[4, 4]
%9 = mul(%21, 2)  : f32[4, 4]
%13 = move {dp: S(0)} -> {dp: R}(%10)  : f32[4, 4]
return %9, %22, %8, %13""",
    )


def test_in_place() -> None:
    """What only the sum needs is overwritten; an input is not, nor what is read again."""

    def fn(p: Any) -> Any:
        q, r = p * 2, p * 3
        return to(p, R), to(q, R), to(r, R), r + r

    before = simplify(recorded(fn, P))
    after = in_place(before)
    assert [n.info.get("owned", False) for n in before.collectives()] == [False] * 3
    assert [n.info.get("owned", False) for n in after.collectives()] == [False, True, False]
    assert_expected_inline(
        text(after),
        """\
%1 = mul(%0, 2)  : f32[4, 4]
%2 = mul(%0, 3)  : f32[4, 4]
%3 = start all_reduce sum over dp(%0)
%4 = wait(%3)  : f32[4, 4]
%5 = start all_reduce sum over dp(%1)
%6 = wait(%5)  : f32[4, 4]
%7 = start all_reduce sum over dp(%2)
%8 = wait(%7)  : f32[4, 4]
%9 = add(%2, %2)  : f32[4, 4]
return %4, %6, %8, %9""",
    )


def test_schedule() -> None:
    def fn(x: Any, p: Any, w: Any, v: Any) -> Any:
        y = x @ to(w, R)
        total = to(p, R)
        z = y @ to(v, R)
        return z.relu(), total * 2

    step = recorded(fn, S0, P, S1, S1)
    assert_expected_inline(
        text(step.lowered()),
        """\
%1 = start all_gather over dp(%0)
%2 = wait(%1)  : f32[2, 4, 2]
%3 = permute(%2, [1, 0, 2])  : f32[4, 2, 2]
%4 = clone(%3, memory_format=contiguous_format)  : f32[4, 2, 2]
%5 = _unsafe_view(%4, [4, 4])  : f32[4, 4]
%7 = mm(%6, %5)  : f32[2, 4]
%9 = start all_reduce sum over dp(%8)
%10 = wait(%9)  : f32[4, 4]
%12 = start all_gather over dp(%11)
%13 = wait(%12)  : f32[2, 4, 2]
%14 = permute(%13, [1, 0, 2])  : f32[4, 2, 2]
%15 = clone(%14, memory_format=contiguous_format)  : f32[4, 2, 2]
%16 = _unsafe_view(%15, [4, 4])  : f32[4, 4]
%17 = mm(%7, %16)  : f32[2, 4]
%18 = relu(%17)  : f32[2, 4]
%19 = mul(%10, 2)  : f32[4, 4]
return %18, %19""",
    )
    slow = partial(
        schedule, profile=Profile((50.0,), (10.0,)), device=CPU, memory_cap_bytes=10**6
    )
    assert_expected_inline(
        text(slow(step)),
        """\
%1 = start all_gather over dp(%0)
%9 = start all_reduce sum over dp(%8)
%12 = start all_gather over dp(%11)
%2 = wait(%1)  : f32[2, 4, 2]
%3 = permute(%2, [1, 0, 2])  : f32[4, 2, 2]
%4 = clone(%3, memory_format=contiguous_format)  : f32[4, 2, 2]
%5 = _unsafe_view(%4, [4, 4])  : f32[4, 4]
%7 = mm(%6, %5)  : f32[2, 4]
%10 = wait(%9)  : f32[4, 4]
%19 = mul(%10, 2)  : f32[4, 4]
%13 = wait(%12)  : f32[2, 4, 2]
%14 = permute(%13, [1, 0, 2])  : f32[4, 2, 2]
%15 = clone(%14, memory_format=contiguous_format)  : f32[4, 2, 2]
%16 = _unsafe_view(%15, [4, 4])  : f32[4, 4]
%17 = mm(%7, %16)  : f32[2, 4]
%18 = relu(%17)  : f32[2, 4]
return %18, %19""",
    )


def test_every_bucket_is_made() -> None:
    def fn(*ps: Any) -> Any:
        return [to(p, R) for p in ps]

    for count, cap in ((2, 256), (4, 128), (3, 192), (8, 64), (8, 1)):
        step = bucket(recorded(fn, *[P] * 8), cap_bytes=cap)
        assert len(step.collectives()) == count


def test_a_profile_sizes_buckets() -> None:
    def fn(*ps: Any) -> Any:
        return [to(p, R) for p in ps]

    step = recorded(fn, *[P] * 8)
    for latency, count in ((0.5, 4), (1.0, 2), (10.0, 1)):  # 16 latencies of 16 bytes per us
        assert len(bucket(step, profile=Profile((latency,), (16.0,))).collectives()) == count


def test_what_is_written_later_does_not_travel_later() -> None:
    """The sum of x is taken before x changes, whatever it could travel with."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def fn(x: Any, y: Any) -> Any:
            a = to(x, R)
            x.add_(x)
            return a, to(y, R), to(x, R)

        outs = []
        for step in (
            fn,
            capture(fn, passes=(bucket,)),
            capture(fn, passes=(partial(bucket, cap_bytes=1),)),
        ):
            for _ in range(3):
                torch.manual_seed(mesh.get_rank())
                xs = [
                    DTensor.from_local(torch.randn(3, 2), mesh, [P], run_check=False)
                    for _ in range(2)
                ]
                got = step(*xs)
            outs.append([t.to_local() for t in got])
        assert all(torch.equal(a, b) for other in outs[1:] for a, b in zip(outs[0], other))

    simulate(run, world_size=2)


def test_zeros_of_both_signs_are_two_numbers() -> None:
    step = recorded(
        lambda x: ((x * 0.0).exp(), (x * 0.0).sin(), (x * -0.0).exp()), R, passes=(simplify,)
    )
    assert text(step).count(" = mul(") == 2


# ---- scale -----------------------------------------------------------------------------------------------


def averaged(x: Any, y: Any) -> Any:
    return to(x * 0.5, R), to(y.neg() * 0.5, R)


def test_scale() -> None:
    assert_expected_inline(
        text(recorded(averaged, P, P, passes=(bucket, simplify, scale))),
        """\
%5 = neg(%4)  : f32[4, 4]
%18 = view(%0, [16])  : f32[16]
%19 = view(%5, [16])  : f32[16]
%20 = cat([%18, %19])  : f32[32]
mul_(%20, 0.5)
%12 = start all_reduce sum over dp(%20)
%13 = wait(%12)  : f32[32]
%14, %15 = split_with_sizes(%13, [16, 16], -1)  : f32[16], f32[16]
%16 = view(%14, [4, 4])  : f32[4, 4]
%17 = view(%15, [4, 4])  : f32[4, 4]
return %16, %17""",
    )


def test_what_is_scaled_differently_or_looked_at_is_scaled_alone() -> None:
    def muls(fn: Any) -> list[str]:
        step = recorded(fn, P, P, passes=(bucket, simplify, scale))
        return re.findall(r"(mul_?)\(", text(step))

    assert muls(averaged) == ["mul_"]
    assert muls(lambda x, y: (to(x * 0.5, R), to(y * 0.25, R))) == ["mul", "mul"]
    assert muls(lambda x, y: (to(x * 0.5, R), to(y, R))) == ["mul"]
    assert muls(lambda x, y: (to(h := x * 0.5, R), to(y * 0.5, R), h)) == ["mul", "mul"]

    def overwritten(x: Any, y: Any) -> Any:
        h = x.neg()
        half = h * 0.5
        h.mul_(3)
        return to(half, R), to(y * 0.5, R), h

    assert muls(overwritten) == ["mul", "mul_", "mul"]


def test_only_what_has_arrived_and_nobody_else_reads_is_scaled_where_it_lies() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def given(x: Any, y: Any, s: Any) -> Any:
            a, b = x.split([3, 3])
            return a * s, b * s

        def looked_at(x: Any, y: Any, s: Any) -> Any:
            x = x + 1
            a, b = x.split([3, 3])
            return a * s, b * s, x.sum()

        def another_factor(x: Any, y: Any, s: Any) -> Any:
            s = s + 1
            a, b, c = (to(on(mesh, P, 3) * k, R).to_local() for k in (y, s, x[0]))
            a = a * s
            s.add_(1)
            return a, b * s, c

        for step in (given, looked_at, another_factor):
            captured = capture(step)
            for _ in range(3):
                x, y, s = torch.ones(6), torch.tensor(3.0), torch.tensor(2.0)
                got = captured(x, y, s)
                assert torch.equal(x, torch.ones(6))
                for a, b in zip(got, step(x, y, s), strict=True):
                    assert torch.equal(a, b)

    simulate(run, world_size=2)


def test_parts_of_several_dtypes_are_rounded_each_in_its_own() -> None:
    def run() -> None:
        def step(x: Any) -> Any:
            joined = torch.cat([x * 0.3, x.double() * 0.3])
            return current().all_gather_async(joined, (0, 1)).wait()

        captured, x = capture(step), torch.randn(5)
        for _ in range(3):
            assert torch.equal(captured(x), step(x))

    simulate(run, world_size=2)


def test_gradients_that_are_averaged_are_scaled_once_and_are_the_same() -> None:
    def run() -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        made = []
        for wrap in (lambda f: f, capture):
            torch.manual_seed(0)
            layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
            model = parallel.data_parallel(layers, mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)

            def step(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            fn = wrap(step)
            torch.manual_seed(mesh.get_rank())
            made.append([fn(torch.randn(3, 4)) for _ in range(5)])
            made[-1] += [p.detach() for p in model.parameters()]
            made[-1] += [p.grad for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
        nodes = fn.last.step.lowered().nodes
        halved = [n for n in nodes if n.name.startswith("aten.mul") and n.args[1] == 0.5]
        assert [n.name for n in halved] == ["aten.mul_.Tensor"]

    simulate(run, world_size=2)


@pytest.mark.parametrize("dst", [Replicate(), Shard(0)])
def test_moves_of_one_local_tensor_under_two_layouts_are_two(dst: Any) -> None:
    """What was summed is taken for a pending sum: it is summed again."""

    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def step(x: Any) -> Any:
            summed = x.sum(0).redistribute(placements=[Replicate()]).to_local()
            again = DTensor.from_local(summed, mesh, [Partial()], run_check=False)
            return again.redistribute(placements=[dst])

        captured = capture(step)
        for i in range(3):
            torch.manual_seed(i)
            x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
            assert torch.equal(captured(x).to_local(), step(x).to_local())

    simulate(both, world_size=2)
