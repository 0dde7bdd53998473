"""The checksum is what its definition says, whatever the way it is computed: files depend on it."""

from hashlib import blake2b

import pytest
import torch

from shardwise.checkpoint.sums import checksum

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
