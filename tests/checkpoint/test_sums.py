"""The checksum is what its definition says, whatever the way it is computed: files depend on it."""

from hashlib import blake2b
import itertools

from hypothesis import given, strategies as st
import pytest
import torch

from shardwise.checkpoint.sums import Stripe, checksum, part_sums, sum_up, sums_length

ROW = 8 * 1024


def defined(data):
    n = data.numel()
    hashed = blake2b(n.to_bytes(8, "little"), digest_size=8)
    whole = n // ROW * ROW
    if whole:
        rows = data[:whole].clone().view(torch.int64).view(-1, 1024)
        hashed.update(rows.sum(0).numpy().tobytes())
        hashed.update(rows.sum(1).numpy().tobytes())
    hashed.update(data[whole:].numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 129, 512])
@pytest.mark.parametrize("more", [0, 5])
def test_checksum(rows, more):
    data = torch.randint(256, (rows * ROW + more + 3,), dtype=torch.uint8)
    assert checksum(data[:-3]) == defined(data[:-3])
    assert checksum(data[3:]) == defined(data[3:])  # not aligned
    if data[:-3].numel():
        changed = data.clone()
        changed[(rows * ROW + more) // 2] ^= 1
        assert checksum(changed[:-3]) != checksum(data[:-3])


@given(st.data())
def test_what_ranks_find_of_a_block_adds_up_to_its_checksum(data):
    """Stretches of any length, cut at any byte: in whole words, across rows of words, and within words."""
    kind = data.draw(st.sampled_from(["words", "bytes", "long"]))
    row = {
        "words": st.sampled_from([64, 512, 3072, 8192, 8 * 1024 * 3, 8 * 1000]),
        "bytes": st.integers(1, 20000),
        "long": st.integers(300_000, 400_000),
    }[kind]
    row = data.draw(row)
    count = data.draw(st.integers(1, max(1, 1_200_000 // row)))
    grain = 8 if kind == "words" else 1
    cuts = data.draw(st.lists(st.integers(0, row // grain), max_size=3).map(sorted))
    edges = [0, *(grain * c for c in cuts), row]
    g = torch.Generator().manual_seed(row)
    block = torch.randint(256, (count * row,), dtype=torch.uint8, generator=g)
    total = torch.zeros(sums_length(len(block)), dtype=torch.int64)
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            total += part_sums(block, Stripe(count, begin, end))
    assert sum_up(len(block), total) == checksum(block) == defined(block)
