"""Writes tests/golden/sampling.npz: what transformers' logits processors make of random logits.

pip install torch==2.13.0 transformers
python tests/make_sampling_golden.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

SETTINGS = [  # temperature, top_k, top_p; 0 and 1 stand for "not used" in top_k and top_p
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (2.5, 0, 1.0),
    (1.0, 1, 1.0),
    (1.0, 7, 1.0),
    (1.0, 400, 1.0),
    (1.0, 0, 0.05),
    (1.0, 0, 0.5),
    (1.0, 0, 0.9),
    (1.0, 0, 0.999),
    (0.8, 40, 0.95),
    (1.5, 5, 0.3),
]

logits = np.random.default_rng(0).standard_normal((4, 300), dtype=np.float32) * np.array(
    [[0.5], [1], [3], [8]], np.float32
)
probabilities = []
for temperature, top_k, top_p in SETTINGS:
    x = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits))
    if top_k:
        x = TopKLogitsWarper(top_k)(None, x)
    if top_p < 1:
        x = TopPLogitsWarper(top_p)(None, x)
    probabilities.append(torch.softmax(x, -1).numpy())
np.savez_compressed(
    Path(__file__).parent / "golden" / "sampling.npz",
    logits=logits,
    settings=np.array(SETTINGS),
    probabilities=np.array(probabilities),
)
