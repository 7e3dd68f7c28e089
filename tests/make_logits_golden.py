"""Writes tests/golden/logits.npz: what Hugging Face transformers computes for three random models and the bundled one.

pip install torch==2.13.0 transformers
python tests/make_logits_golden.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
from tiny import random_params, random_tokens
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).resolve().parent

CONFIGS = {
    "small": {"n_vocab": 50, "n_ctx": 16, "n_embd": 12, "n_head": 3, "n_layer": 2, "seed": 1},
    "one_head": {"n_vocab": 97, "n_ctx": 32, "n_embd": 20, "n_head": 1, "n_layer": 3, "seed": 2},
    "wide": {"n_vocab": 300, "n_ctx": 64, "n_embd": 96, "n_head": 12, "n_layer": 4, "seed": 3},
}


def flatten(params):
    """The engine's nested dicts -> transformers' names (its Conv1D keeps matrices as [n_in, n_out], like OpenAI)."""
    names = {"w": "weight", "g": "weight", "b": "bias"}

    def walk(tree, prefix):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + names[key], value

    state = {"wte.weight": params["wte"], "wpe.weight": params["wpe"]}
    state |= dict(walk({"ln_f": params["ln_f"]}, ""))
    for i, block in enumerate(params["blocks"]):
        state |= dict(walk(block, f"h.{i}."))
    return {f"transformer.{name}": torch.tensor(np.array(value)) for name, value in state.items()}


def from_checkpoint(weights):
    """checkpoint.load_weights' flat names -> transformers' names."""
    ends = {"w": "weight", "g": "weight", "b": "bias", "wte": "wte.weight", "wpe": "wpe.weight"}
    state = {}
    for name, value in weights.items():
        *path, last = name.split("/")
        path = ["h", path[0][1:], *path[1:]] if path and path[0].startswith("h") else path
        state[".".join(["transformer", *path, ends[last]])] = torch.tensor(np.array(value))
    return state


def logits(state, tokens, n_vocab, n_ctx, n_embd, n_head, n_layer):
    config = GPT2Config(
        vocab_size=n_vocab,
        n_positions=n_ctx,
        n_embd=n_embd,
        n_head=n_head,
        n_layer=n_layer,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()  # [n_seq, n_vocab]


golden = {}
for name, config in CONFIGS.items():
    shape = {key: value for key, value in config.items() if key != "seed"}
    params = random_params(**{key: value for key, value in config.items() if key != "n_head"})
    tokens = random_tokens(config["n_ctx"], config["n_vocab"], config["seed"])
    golden[name] = logits(flatten(params), tokens, **shape)
    golden[name + "_config"] = np.array(
        [config[key] for key in ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", "seed")]
    )

bundled = HERE.parent / "models" / "fairytale"
if (bundled / "checkpoint").exists():
    sys.path.insert(0, str(HERE.parent))
    from checkpoint import load_weights

    tokens = random_tokens(256, 2048)
    shape = {"n_vocab": 2048, "n_ctx": 256, "n_embd": 160, "n_head": 5, "n_layer": 4}
    everywhere = logits(from_checkpoint(load_weights(bundled)), tokens, **shape)
    golden["fairytale"] = everywhere[::16]  # every 16th position keeps the file small
np.savez_compressed(HERE / "golden" / "logits.npz", **golden)
