"""Writes 600 greedy tokens after each of the prompts with and without the cache and compares them. Takes some minutes.

    .venv/bin/python tests/compare_texts.py

A shorter text is a beginning of a longer one, so this covers all lengths up to 600. Prints how many texts differ, and
how many steps there were where the two highest logits lay within 1e-5: only there may rounding pick differently.
"""

import sys
from pathlib import Path

import numpy as np
from prompts import PROMPTS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gpt2  # noqa: E402
import gpt2_kvcache  # noqa: E402
from utils import load_encoder_hparams_and_params  # noqa: E402

encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
gaps = []


def greedy_noting_gaps(logits):
    second, first = np.partition(logits, -2)[-2:]
    gaps.append(float(first - second))
    return int(logits.argmax())


n_different = 0
for prompt in PROMPTS:
    inputs = encoder.encode(prompt) or [encoder.end_of_text]
    arguments = (params, hparams["n_head"], 600, greedy_noting_gaps, encoder.end_of_text)
    plain, cached = (way.generate(inputs, *arguments) for way in (gpt2, gpt2_kvcache))
    if plain != cached:
        n_different += 1
        print(f"{prompt!r:.60}: differ after {sum(np.cumprod([a == b for a, b in zip(plain, cached, strict=False)]))}")
print(f"{len(PROMPTS)} prompts, {len(gaps)} steps; {n_different} texts differ")
print(f"two highest logits within 1e-5 in {sum(gap < 1e-5 for gap in gaps)} steps; smallest distance {min(gaps):.1e}")
