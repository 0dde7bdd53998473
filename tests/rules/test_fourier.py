"""Short-time Fourier transforms and back: signals are cut anyhow, and pending sums pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Partial, Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture
def window() -> Tensor:
    return torch.hann_window(8, dtype=torch.float64) + 0.1


def forth(x: Tensor, window: Tensor) -> Any:
    return torch.stft(x, 8, 2, window=window, return_complex=True)


def back(x: Tensor, window: Tensor) -> Any:
    return torch.istft(x, 8, 2, window=window)


def test_one_signal_or_several(window: Tensor) -> None:
    torch.manual_seed(0)
    for x in (torch.randn(20).double(), torch.randn(3, 20).double()):
        assert not sweep(forth, x, window, extra=2)
        spectrum = forth(x, window)
        assert not sweep(back, spectrum, window, extra=2)
        assert not sweep(
            lambda s: torch.istft(s, 8, 2, length=15), spectrum, extra=2, twice=True
        )
        for p in (P, S(0)) if x.ndim > 1 else (P,):
            assert not bytes_moved(forth, [x, window], (2,), ((p,), (R,)))
            assert not bytes_moved(back, [spectrum, window], (2,), ((p,), (R,)))


def test_windows_that_leave_gaps_are_refused_on_all_ranks() -> None:
    spectrum = torch.randn(3, 5, 6, dtype=torch.complex128)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        bytes_moved(back, [spectrum, torch.zeros(8).double()], (2,), ((S(0),), (R,)))
