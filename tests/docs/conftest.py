"""The demo as a module."""

from collections.abc import Iterator
import importlib.util
from pathlib import Path
import sys
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def demo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "01_train_gpt.py")
    assert spec is not None, "the script is where it was"
    assert spec.loader is not None, "and is Python"
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))
    del sys.modules["train_gpt"]
