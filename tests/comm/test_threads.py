"""The threads transport: values, isolation between ranks, and what happens when ranks err."""

from contextvars import ContextVar
import time

import pytest
import torch
from torch import Tensor

from shardwise.comm import Handle, ThreadsTransport, current
from shardwise.errors import AbortedError, CommError, DeadlockError, ShardError
from shardwise.simulate import simulate

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16]
SHAPES = [(), (3,), (2, 3), (0, 4)]
GROUPS = [(0, 1, 2, 3), (3, 0, 2)]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, different on every rank and in every place."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count).reshape(shape) * 7 + rank * 3 + 1
    if dtype == torch.bool:
        return numbers % 3 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double() % 5, numbers.double() % 3).to(dtype)
    return (numbers % 5).to(dtype)


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.equal(got, want), (got, want)


# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64])
def test_all_gather_and_broadcast(ranks, shape, dtype):
    def body(rank):
        if rank not in ranks:
            return
        t = current()
        x = value(rank, shape, dtype)
        same(t.all_gather(x, ranks), torch.stack([value(r, shape, dtype) for r in ranks]))
        same(t.broadcast(x, ranks, ranks[1]), value(ranks[1], shape, dtype))
        same(x, value(rank, shape, dtype))

    simulate(body, 4)


REDUCTIONS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / parts.shape[0],
    "product": lambda parts: parts.prod(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reductions(ranks, op, shape):
    n = len(ranks)

    def body(rank):
        if rank not in ranks:
            return
        t = current()
        for dtype in DTYPES:
            if op == "avg" and not dtype.is_floating_point:
                continue
            parts = torch.stack([value(r, shape, dtype) for r in ranks])
            want = REDUCTIONS[op](parts.double()).to(dtype)
            same(t.all_reduce(value(rank, shape, dtype), ranks, op), want)

            parts = torch.stack([value(r, (n, *shape), dtype) for r in ranks])
            want = REDUCTIONS[op](parts.double()).to(dtype)[ranks.index(rank)]
            same(t.reduce_scatter(value(rank, (n, *shape), dtype), ranks, op), want)

    simulate(body, 4)


def test_reductions_of_bools_bits_and_complex():
    ranks = (2, 0, 1)

    def body(rank):
        t = current()
        flags = torch.stack([value(r, (6,), torch.bool) for r in ranks])
        mine = value(rank, (6,), torch.bool)
        for op in ("sum", "max", "bor"):
            same(t.all_reduce(mine, ranks, op), flags.any(0))
        for op in ("product", "min", "band"):
            same(t.all_reduce(mine, ranks, op), flags.all(0))
        same(t.all_reduce(mine, ranks, "bxor"), flags[0] ^ flags[1] ^ flags[2])

        a, b, c = (value(r, (6,), torch.int32) for r in ranks)
        mine = value(rank, (6,), torch.int32)
        same(t.all_reduce(mine, ranks, "band"), a & b & c)
        same(t.all_reduce(mine, ranks, "bor"), a | b | c)
        same(t.all_reduce(mine, ranks, "bxor"), a ^ b ^ c)

        a, b, c = (value(r, (6,), torch.complex64) for r in ranks)
        mine = value(rank, (6,), torch.complex64)
        same(t.all_reduce(mine, ranks, "sum"), a + b + c)
        same(t.all_reduce(mine, ranks, "product"), a * b * c)
        same(t.all_reduce(mine.conj(), ranks, "sum"), (a + b + c).conj().resolve_conj())

    simulate(body, 3)


def test_sum_runs_in_group_order_and_narrow_floats_add_up_in_float32():
    def body(rank):
        t = current()
        x = torch.tensor([[1e8, 1.0, -1e8][rank]])
        forward, other = t.all_reduce(x, (0, 1, 2)), t.all_reduce(x, (0, 2, 1))
        ones = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
        return forward.item(), other.item(), t.all_reduce(ones, (0, 1, 2)).item()

    assert simulate(body, 3) == [(0.0, 1.0, 258.0)] * 3


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_all_to_all_uneven(ranks, dtype):
    counts = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]  # from place i to place j

    def sent(i):
        return value(ranks[i], (sum(counts[i]),), dtype)

    def body(rank):
        i = ranks.index(rank)
        into = [row[i] for row in counts]
        want = torch.cat([sent(j).split(counts[j])[i] for j in range(3)])
        t = current()
        same(t.all_to_all(sent(i), ranks, counts[i], into), want)
        same(t.all_to_all_async(sent(i), ranks, counts[i], into).wait(), want)
        same(t.all_to_all(sent(i)[:0], ranks, [0] * 3, [0] * 3), want[:0])

    simulate(body, 3)


def test_scatter_uneven():
    ranks, shapes = (2, 0, 1), [(2, 2), (), (0, 3)]
    pieces = [value(i, shape) for i, shape in enumerate(shapes)]

    def body(rank):
        like = torch.empty(shapes[ranks.index(rank)])
        got = current().scatter(pieces if rank == 0 else None, like, ranks, 0)
        same(got, pieces[ranks.index(rank)])
        assert got.data_ptr() != pieces[ranks.index(rank)].data_ptr() or got.numel() == 0

    simulate(body, 3)


def test_objects_and_barrier():
    shared = {"x": [1]}

    def body(rank):
        t = current()
        t.barrier((0, 1, 2))
        everybody = t.all_gather_object((rank, shared), (2, 1, 0))
        assert [r for r, _ in everybody] == [2, 1, 0]
        assert all(each is not shared for _, each in everybody)

    simulate(body, 3)


def test_a_group_of_one_is_the_identity_and_never_an_alias():
    def body(rank):
        t, own = current(), (rank,)
        x = torch.arange(3.0)
        chunk = x.unsqueeze(0)
        results = [
            t.all_reduce(x, own),
            t.all_gather(x, own)[0],
            t.reduce_scatter(chunk, own),
            t.all_to_all(x, own, [3], [3]),
            t.broadcast(x, own, rank),
            t.scatter([x], x, own, rank),
        ]
        for result in results:
            same(result, x)
            assert result.data_ptr() != x.data_ptr()
        assert t.all_gather_object(5, own) == [5]
        t.barrier(own)

    simulate(body, 2)


def test_results_are_not_shared_between_ranks():
    def body(rank):
        t = current()
        x = torch.full((2,), float(rank))
        for result in (
            t.all_reduce(x, (0, 1)),
            t.all_gather(x, (0, 1)),
            t.broadcast(x, (0, 1), 0),
        ):
            before = result.clone()
            t.barrier((0, 1))
            result += 10 * (rank + 1)
            t.barrier((0, 1))
            same(result, before + 10 * (rank + 1))

    simulate(body, 2)


def test_inputs_that_are_views_or_part_of_a_graph():
    def body(rank):
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        y = current().all_reduce(x.t(), (0, 1))
        assert not y.requires_grad
        assert y.is_contiguous()
        same(y, (2 * x.t()).detach().contiguous())
        z = torch.tensor([1 + 2j]).conj().imag  # a lazy negative
        same(current().all_reduce(z, (0, 1)), torch.tensor([-4.0]))

    simulate(body, 2)


def test_async_may_change_the_input_after_the_wait_and_overlap():
    def body(rank):
        t = current()
        x = torch.full((3,), float(rank))
        first = t.all_reduce_async(x, (0, 1, 2))
        second = t.all_gather_async(x, (0, 1, 2))
        third = t.reduce_scatter_async(x, (0, 1, 2), "max")
        x.fill_(99)  # a mistake in a real run; here the value at the start counts
        assert isinstance(first, Handle)
        same(third.wait(), torch.tensor(2.0))
        same(first.wait(), torch.full((3,), 3.0))
        assert first.wait() is first.wait()
        same(second.wait(), torch.arange(3.0).unsqueeze(1).expand(3, 3).contiguous())

    simulate(body, 3)


def test_async_on_crossing_groups_does_not_deadlock():
    def body(rank):
        t = current()
        order = [(0, 1), (1, 2)] if rank == 1 else [(1, 2), (0, 1)]
        handles = [
            t.all_reduce_async(torch.tensor(float(rank)), ranks)
            for ranks in order
            if rank in ranks
        ]
        return sorted(handle.wait().item() for handle in handles)

    assert simulate(body, 3) == [[1.0], [1.0, 3.0], [3.0]]


def test_eight_ranks_on_a_three_dimensional_mesh():
    def body(rank):
        t = current()
        x = torch.tensor(float(rank))
        for bit in (1, 2, 4):
            x = t.all_reduce(x, tuple(sorted((rank, rank ^ bit))))
        return x.item()

    assert simulate(body, 8) == [28.0] * 8


def test_a_peer_may_write_in_place_right_after():
    def body(rank):
        t = current()
        x = torch.full((1000,), float(rank))
        for step in range(20):
            y = t.all_reduce(x, (0, 1, 2, 3))
            x += 1
            same(y, torch.full((1000,), 6.0 + 4 * step))

    simulate(body, 4)


# ---- the world of a rank --------------------------------------------------------------------


def test_each_rank_has_its_own_rng():
    def body(rank):
        t = current()
        first = torch.rand(2)
        torch.manual_seed(rank)
        t.barrier((0, 1, 2))
        second = torch.rand(3)
        t.barrier((0, 1, 2))
        return first, torch.cat([second, torch.rand(3)])

    torch.manual_seed(5)
    results = simulate(body, 3)
    after = torch.rand(1)

    torch.manual_seed(5)
    first = torch.rand(2)
    for rank, (mine, draws) in enumerate(results):
        same(mine, first)
        torch.manual_seed(rank)
        same(draws, torch.rand(6))
    torch.manual_seed(0)
    torch.rand(6)
    same(after, torch.rand(1))


def test_default_dtype_and_modes_are_per_rank():
    def body(rank):
        if rank == 1:
            torch.set_default_dtype(torch.float64)
        current().barrier((0, 1))
        assert not torch.is_grad_enabled()
        return torch.ones(1).dtype, torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        results = simulate(body, 2)
    assert torch.get_default_dtype() == torch.float32
    assert results[0] == (torch.float32, torch.bfloat16)
    assert results[1][0] == torch.float64


def test_default_device_and_inference_mode_follow():
    with torch.device("meta"), torch.inference_mode():
        results = simulate(
            lambda: (torch.ones(1).device.type, torch.is_inference_mode_enabled()), 2
        )
    assert results == [("meta", True)] * 2


_label: ContextVar[str] = ContextVar("label", default="none")


def test_context_variables_are_copied():
    def body(rank):
        before = _label.get()
        _label.set(f"rank {rank}")
        current().barrier((0, 1))
        return before, _label.get()

    token = _label.set("caller")
    assert simulate(body, 2) == [("caller", "rank 0"), ("caller", "rank 1")]
    assert _label.get() == "caller"
    _label.reset(token)


def test_how_the_function_is_called():
    assert simulate(lambda: current().rank, 2) == [0, 1]
    assert simulate(lambda rank, a, b: (rank, a, b), 2, "a", "b") == [
        (0, "a", "b"),
        (1, "a", "b"),
    ]
    assert simulate(lambda *args: args, 1, 7) == [(0, 7)]
    with pytest.raises(CommError, match="at least one"):
        simulate(print, 0)


def test_transport_of_a_rank():
    def body(rank):
        t = current()
        assert isinstance(t, ThreadsTransport)
        assert (t.rank, t.world_size, t.name, t.state) == (rank, 3, "threads", {})
        t.state["mine"] = rank
        group = t.group((2, 0, 1))
        t.barrier((0, 1, 2))
        return t.state["mine"], group.size(), group.rank()

    assert simulate(body, 3) == [(0, 3, 1), (1, 3, 2), (2, 3, 0)]


def test_nested_simulations():
    def inner(rank):
        return current().all_reduce(torch.tensor(rank + 1), (0, 1)).item()

    def outer(rank):
        results = simulate(inner, 2)
        return results, current().all_reduce(torch.tensor(rank), (0, 1, 2)).item()

    assert simulate(outer, 3) == [([3, 3], 3)] * 3


class _Meet(torch.autograd.Function):
    """The identity whose backward is an all_reduce."""

    @staticmethod
    def forward(ctx, x, transport, ranks):
        ctx.transport, ctx.ranks = transport, ranks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.transport.all_reduce(grad, ctx.ranks), None, None


def test_backward_blocks_in_a_collective():
    ranks = (0, 1, 2, 3)

    def body(rank):
        x = torch.ones(3, requires_grad=True)
        y = x
        for _ in range(5):
            y = _Meet.apply(y * (rank + 1), current(), ranks)
        y.sum().backward()
        assert x.grad is not None
        return x.grad[0].item()

    results = simulate(body, 4)
    # grad of rank r: start with 1; five times sum over ranks, then times (r + 1)
    grads = [1.0] * 4
    for _ in range(5):
        total = sum(grads)
        grads = [total * (r + 1) for r in range(4)]
    assert results == grads


# ---- when ranks err -------------------------------------------------------------------------


def raises_quickly(body, world_size, error):
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        simulate(body, world_size)
    assert time.perf_counter() - start < 1, "an error must not wait for a timeout"
    return caught.value


def test_the_first_error_comes_out_with_its_rank():
    seen = []

    def body(rank):
        t = current()
        t.barrier((0, 1, 2))
        if rank == 1:
            raise KeyError("lost")
        try:
            t.barrier((0, 1, 2))
        except AbortedError as error:
            seen.append((rank, str(error)))
            raise

    error = raises_quickly(body, 3, KeyError)
    assert error.__notes__ == ["on rank 1"]
    assert seen == [
        (2, "rank 1 raised KeyError: 'lost'"),
        (0, "rank 1 raised KeyError: 'lost'"),
    ]


def test_an_error_in_a_backward_comes_out():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if current().rank == 2:
                raise ValueError("bad gradient")
            return current().all_reduce(grad, (0, 1, 2))

    def body(rank):
        Bad.apply(torch.ones(1, requires_grad=True)).sum().backward()

    assert raises_quickly(body, 3, ValueError).__notes__ == ["on rank 2"]


def test_a_rank_that_returns_early_is_named():
    def body(rank):
        if rank == 0:
            current().all_reduce(torch.ones(1), (0, 1))

    error = raises_quickly(body, 2, DeadlockError)
    assert "rank 0 waits in all_reduce over ranks (0, 1) for rank 1, at " in str(error)
    assert "test_threads.py:" in str(error)
    assert "rank 1 has returned" in str(error)
    assert isinstance(error, ShardError)


def test_ranks_that_wait_for_each_other_all_raise():
    caught = []

    def body(rank):
        try:
            current().barrier((rank, (rank + 1) % 3))
        except DeadlockError as error:
            caught.append((rank, str(error)))
            raise

    raises_quickly(body, 3, DeadlockError)
    assert sorted(rank for rank, _ in caught) == [0, 1, 2]
    assert len({text for _, text in caught}) == 1
    for rank in range(3):
        peer = (rank + 1) % 3
        line = f"rank {rank} waits in barrier over ranks ({rank}, {peer}) for rank {peer}"
        assert line in caught[0][1]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda t: t.all_gather(torch.ones(2), (0, 1)), "all_gather(float32, [2])"),
        (lambda t: t.all_reduce(torch.ones(3), (0, 1)), "all_reduce(float32, [3], sum)"),
        (lambda t: t.all_reduce(torch.ones(2).int(), (0, 1)), "all_reduce(int32, [2], sum)"),
        (lambda t: t.all_reduce(torch.ones(2), (0, 1), "max"), "all_reduce(float32, [2], max)"),
        (lambda t: t.all_reduce_async(torch.ones(3), (0, 1)), "all_reduce(float32, [3], sum)"),
    ],
)
def test_mismatched_collectives(other, said):
    caught = []

    def body(rank):
        t = current()
        try:
            other(t) if rank == 1 else t.all_reduce(torch.ones(2), (0, 1))
        except DeadlockError as error:
            caught.append(str(error))
            raise

    error = raises_quickly(body, 2, DeadlockError)
    assert caught == [str(error)] * 2
    assert "rank 0 calls all_reduce(float32, [2], sum), at " in str(error)
    assert f"rank 1 calls {said}, at " in str(error)


def test_what_cannot_be_asked_for():
    def refused(call, match):
        with pytest.raises(CommError, match=match):
            call(current())

    def body():
        x, both = torch.ones(2), (0, 1)
        refused(lambda t: t.all_reduce(x, both, "mean"), "no reduction 'mean'")
        refused(lambda t: t.all_reduce(x.int(), both, "avg"), "means nothing for torch.int32")
        refused(lambda t: t.all_reduce(x, both, "bor"), "means nothing")
        refused(lambda t: t.reduce_scatter(torch.ones(3), both), r"takes \[2, ...\]")
        refused(lambda t: t.all_to_all(x, both, [1, 2], [1, 2]), "splits")
        refused(lambda t: t.broadcast(x, both, 5), "not in the group")
        refused(lambda t: t.scatter(None, x, both, t.rank), "as many tensors")
        refused(lambda t: t.all_reduce(x, (1 - t.rank, 7)), "no group of ranks")
        refused(lambda t: t.all_reduce(x, (0, 0)), "no group of ranks")
        refused(lambda t: t.group((1 - t.rank,)), "is not in the group")

    simulate(body, 2)


def test_wrong_splits_and_wrong_pieces_are_named():
    caught = []

    def wrong_splits(rank):
        into = [1, 1] if rank else [1, 2]
        try:
            current().all_to_all(torch.ones(2), (0, 1), [1, 1], into)
        except CommError as error:
            caught.append(str(error))
            raise

    assert "sends 1 elements to rank 0, which expects 2" in str(
        raises_quickly(wrong_splits, 2, CommError)
    )
    assert len(caught) == 2
    assert len(set(caught)) == 1

    def wrong_piece(rank):
        pieces = [torch.ones(1), torch.ones(2)] if rank == 0 else None
        current().scatter(pieces, torch.ones(1), (0, 1), 0)

    assert "rank 1 expects (1,), rank 0 sends it (2,)" in str(
        raises_quickly(wrong_piece, 2, CommError)
    )
