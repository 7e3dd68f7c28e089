"""Writes tests/golden/logits.npz: what Hugging Face transformers computes for three random models and the bundled one.

pip install -r requirements.txt torch==2.13.0 transformers
python tests/make_logits_golden.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
from tiny import random_params, random_tokens

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from bench import torch_model  # noqa: E402
from utils import load_encoder_hparams_and_params  # noqa: E402

CONFIGS = {
    "small": {"n_vocab": 50, "n_ctx": 16, "n_embd": 12, "n_head": 3, "n_layer": 2, "seed": 1},
    "one_head": {"n_vocab": 97, "n_ctx": 32, "n_embd": 20, "n_head": 1, "n_layer": 3, "seed": 2},
    "wide": {"n_vocab": 300, "n_ctx": 64, "n_embd": 96, "n_head": 12, "n_layer": 4, "seed": 3},
}


def logits(params, tokens, n_head):
    with torch.no_grad():
        return torch_model(params, n_head)(torch.tensor([tokens])).logits[0].numpy()  # [n_seq, n_vocab]


golden = {}
for name, config in CONFIGS.items():
    params = random_params(**{key: value for key, value in config.items() if key != "n_head"})
    tokens = random_tokens(config["n_ctx"], config["n_vocab"], config["seed"])
    golden[name] = logits(params, tokens, config["n_head"])
    order = ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", "seed")
    golden[name + "_config"] = np.array([config[key] for key in order])

_, hparams, params = load_encoder_hparams_and_params("fairytale")
tokens = random_tokens(hparams["n_ctx"], hparams["n_vocab"])
golden["fairytale"] = logits(params, tokens, hparams["n_head"])[::16]  # every 16th position keeps the file small
np.savez_compressed(HERE / "golden" / "logits.npz", **golden)
