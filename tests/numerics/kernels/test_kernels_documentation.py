"""The example of docs/kernels.md runs as it stands, and its adapters learn."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_training_loop_of_the_page_runs():
    page = Path(__file__).parents[3] / "docs" / "kernels.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(code, str(page), "exec"), namespace)
    first, last = namespace["losses"][0], namespace["losses"][-1]
    for before, after in zip(first, last, strict=True):
        assert after < 0.8 * before
