"""Medians and the like along a sharded dim, found by counting where that moves less than a gather."""

import pytest
import torch

from shardwise import Shard
from shardwise.rules.select import of_rank
from shardwise.testing.sweep import bytes_moved, check, sweep

S = Shard
D = torch.float64
CALLS = {
    "median": lambda x: (x.median(), *x.median(1), *torch.median(x, 1, True)),
    "nanmedian": lambda x: (x.nanmedian(), *x.nanmedian(1)),
    "kthvalue": lambda x: (*x.kthvalue(777, 1), *torch.kthvalue(x, 59_000, 1, True)),
}


class Alone:
    """The group of one rank."""

    def reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return x


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [D, torch.float32, torch.int64, torch.int16, torch.uint8])
def test_every_rank_of_every_dtype(dtype: torch.dtype, bits: int) -> None:
    x = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype is not torch.uint8:
        x = x - 90
    if dtype.is_floating_point:
        x = x * 1.7
        x[0, 3], x[1, 5], x[1, 6], x[2, 0] = -torch.nan, torch.inf, -torch.inf, -0.0
    got = of_rank(Alone(), x, torch.arange(40).expand(3, 40), bits)
    torch.testing.assert_close(got, x.sort(-1).values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_long_rows(name: str) -> None:
    x = torch.randn(2, 60_001, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    x[:, 77, 1] = torch.nan
    # two all_reduces of counts: 8 rounds of 255 for each of up to 4 rows, the index, and the NaNs
    most = 3 * 2 * 3 * (4 * 8 * 255 * 4 + 200)
    for mesh, combo in (((4,), ((S(1),),)), ((2, 2), ((S(1), S(2)),))):
        assert check(CALLS[name], [x], mesh, combo) is None
        assert bytes_moved(CALLS[name], [x], mesh, combo) < most < 3 * x.nbytes // 5


@pytest.mark.parametrize("name", ["median", "nanmedian", "quantile", "nanquantile"])
def test_short_rows(name: str) -> None:
    x = torch.randn(3, 5, 4, dtype=D, generator=torch.Generator().manual_seed(0))
    f = getattr(torch, name)
    if "quantile" not in name:
        assert not sweep(lambda x: (f(x), *f(x, 1)), x, meshes=((4,),), extra=2)
        return
    q = torch.tensor([0.2, 0.9], dtype=D)
    assert not sweep(
        lambda x, q: (f(x, 0.3), f(x, 0.3, 1, True), f(x, q.detach(), 0), f(x, 0.5, -1)),
        x,
        q,
        meshes=((4,), (2, 2)),
        extra=2,
        grad=False,
    )
    assert not sweep(lambda x: f(x, 0.3, 1, interpolation="lower"), x, meshes=((4,),))
    assert bytes_moved(lambda x: f(x, 0.3, 1), [x], (2,), ((S(0),),)) == 0
