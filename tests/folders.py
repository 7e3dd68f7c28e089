"""Folders in Hugging Face's layout for the tests."""

import json
from pathlib import Path

import safetensors.numpy
from tiny import random_tokens

import gpt2
from utils import load_encoder_hparams_and_params

GOLDEN = Path(__file__).parent / "golden" / "huggingface"
MODELS = ("sharded", "bf16", "settings")  # written by transformers: tests/make_huggingface_golden.py


def load(folder):
    return load_encoder_hparams_and_params(folder.name, folder.parent)


def logits(params, n_head, n_vocab=377):
    return gpt2.gpt2(random_tokens(16, n_vocab), **params, n_head=n_head)


def edit(path, **changes):
    """Changes keys of a JSON file; None takes one out."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def stored(folder):
    """name -> float32 array of a golden model in one file, by the safetensors package."""
    return safetensors.numpy.load_file(folder / "model.safetensors")
