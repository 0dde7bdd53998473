"""The state of the random number generators, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RNG:
    """Stands in a state for the generators of torch (CPU and this rank's GPU), Python and numpy.

    Shardwise draws from torch's generators, dropout included; all ranks have them in step, so one state serves
    any number of ranks. Python's and numpy's are those of rank 0.

    Example:
        >>> checkpoint.save({"model": model, "rng": checkpoint.RNG()}, path)
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "torch": torch.get_rng_state(),
            "cuda": tuple(torch.cuda.get_rng_state().tolist()) if gpu else None,
            "python": random.getstate(),
            "numpy": (
                str(kind),
                tuple(map(int, keys)),
                int(position),
                int(has_gauss),
                float(gauss),
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; one that there is no state of stays as it is."""
        torch.set_rng_state(state["torch"])
        if state.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
