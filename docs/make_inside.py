"""Draws docs/inside.png with the functions of docs/inside.md. Needs matplotlib.

.venv/bin/pip install matplotlib && .venv/bin/python docs/make_inside.py
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

scope = {}
with contextlib.redirect_stdout(io.StringIO()):
    for example in re.findall(r"^```python\n(.*?)^```", (HERE / "inside.md").read_text(), re.DOTALL | re.MULTILINE):
        exec(example, scope)
words, maps, surprise = (scope[name] for name in ("words", "maps", "surprise"))
head = int(maps[:, -1, 1:].max(axis=-1).argmax())  # the head that looks most sharply somewhere else than at the start

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
left.imshow(maps[head], cmap="Blues", vmin=0, vmax=1)
left.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
left.set_yticks(range(len(words)), words, fontsize=8)
left.set_title(f"where head {head} of block 2 looks: each row's token takes from the dark ones", fontsize=9)
right.barh(range(1, len(words)), surprise, color="tab:orange")
right.set_yticks(range(1, len(words)), words[1:], fontsize=8)
right.invert_yaxis()
right.set_xlabel("surprise in bits")
right.set_title("how improbable each token was", fontsize=9)
figure.savefig(HERE / "inside.png", dpi=110)
