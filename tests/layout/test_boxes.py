"""Cutting: as torch.chunk does, axis after axis."""

import itertools
import math

import pytest
import torch

from shardwise.layout import boxes


def test_chunks_are_those_of_torch():
    for n, k in itertools.product(range(12), range(1, 6)):
        want = [len(c) for c in torch.arange(n).chunk(k)] if n else [0]
        want += [0] * (k - len(want))
        got = [boxes.chunk(n, k, i) for i in range(k)]
        assert [size for _, size in got] == want
        assert [start for start, _ in got] == [min(sum(want[:i]), n) for i in range(k)]


def test_several_axes_cut_one_after_the_other():
    pieces = [boxes.nested(5, (2, 2), (i, j)) for i in range(2) for j in range(2)]
    assert pieces == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_a_box_names_offsets_and_sizes():
    assert boxes.box((5, 7, 2), ((1,), (), (0,)), (2, 3), (1, 2)) == ((4, 0, 1), (1, 7, 1))
    assert boxes.box((), (), (2,), (1,)) == ((), ())


def test_even_means_that_all_pieces_are_equal():
    assert boxes.is_even(8, (2, 2))
    assert not boxes.is_even(6, (2, 2))
    assert boxes.is_even(0, (3,))


def test_strides():
    assert boxes.contiguous_stride((2, 0, 3)) == torch.empty(2, 0, 3).stride()
    assert boxes.contiguous_stride(()) == ()
    last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert boxes.restride((2, 3, 4, 5), last.stride()) == last.stride()
    assert boxes.restride((2, 3), (1, 2)) == (1, 2)
    assert boxes.restride((4, 3), torch.empty(1, 3).expand(4, 3).stride()) == (0, 1)


@pytest.mark.parametrize(
    "sizes", [(), (1,), (7,), (3, 4), (2, 3, 5), (4, 1, 6), (1, 1, 1), (2, 2, 2, 3)]
)
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 100])
def test_runs_follow_memory(sizes, limit):
    x = torch.arange(math.prod(sizes)).reshape(sizes)
    pieces = [
        x[boxes.slices(box, ((0,) * len(sizes), sizes))].reshape(-1)
        for box in boxes.runs(sizes, limit)
    ]
    assert torch.equal(torch.cat(pieces), x.reshape(-1))
    assert max(p.numel() for p in pieces) <= limit


def test_nothing_has_no_runs():
    assert boxes.runs((3, 0, 2), 4) == []


def test_overlaps():
    assert boxes.overlap(((0, 2), (4, 3)), ((3, 0), (5, 4))) == ((3, 2), (1, 2))
    assert boxes.overlap(((0, 2), (4, 3)), ((4, 0), (5, 4))) is None
    assert boxes.overlap(((), ()), ((), ())) == ((), ())
