"""What every test starts from: one torch thread, fixed seeds, a hypothesis profile."""

from collections.abc import Iterator
import random

from hypothesis import HealthCheck, settings
import numpy as np
import pytest
import torch

torch.set_num_threads(1)

SLOW_MACHINES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=25, derandomize=True, **SLOW_MACHINES)
settings.register_profile("full", max_examples=500, print_blob=True, **SLOW_MACHINES)
settings.load_profile("quick")  # --hypothesis-profile=full replaces it


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Seed every generator before a test; give back torch's global modes after it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
