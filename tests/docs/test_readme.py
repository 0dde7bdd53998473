"""The README's program runs, and prints what the README says."""

import contextlib
import io
from pathlib import Path
import re

ROOT = Path(__file__).parents[2]


def test_the_first_program_prints_what_it_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    said = code.strip().splitlines()[-1].removeprefix("# ")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue().strip() == said


def test_every_link_leads_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target and target != "docs/performance.md":
                assert (page.parent / target).exists(), f"{name} links to {target}"
