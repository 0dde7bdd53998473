"""The program of docs/propagation.md runs, and prints what the page says."""

import contextlib
import io
from pathlib import Path
import re

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "propagation.md"


@pytest.mark.slow
def test_the_program_prints_what_it_says():
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    said = re.search(r"```text\n(.*?)```", text, re.S).group(1).splitlines()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "train.py", "exec"), {"__name__": "train"})
    assert out.getvalue().splitlines() == said
