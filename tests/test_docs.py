"""The Python examples of the documents run as they stand, those of one document one after the other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "docs/kv_cache.md", "docs/inside.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_run(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / name).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert examples
    scope = {}
    for example in examples:
        exec(compile(example, name, "exec"), scope)
