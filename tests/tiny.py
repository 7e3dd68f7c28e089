"""Small random models, the same on every machine, for the tests and for the scripts that make golden files."""

import numpy as np


def random_params(n_vocab=50, n_ctx=16, n_embd=12, n_layer=2, seed=0):
    """Weights in the engine's nested dicts, large enough that every part of the model matters to the logits."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)

    def norm():
        return {"g": 1 + normal(n_embd), "b": normal(n_embd)}

    def linear(n_in, n_out):
        return {"w": normal(n_in, n_out), "b": normal(n_out)}

    def block():
        attn = {"c_attn": linear(n_embd, 3 * n_embd), "c_proj": linear(n_embd, n_embd)}
        mlp = {"c_fc": linear(n_embd, 4 * n_embd), "c_proj": linear(4 * n_embd, n_embd)}
        return {"attn": attn, "ln_1": norm(), "ln_2": norm(), "mlp": mlp}

    blocks = [block() for _ in range(n_layer)]
    return {"wte": normal(n_vocab, n_embd), "wpe": normal(n_ctx, n_embd), "blocks": blocks, "ln_f": norm()}


def random_tokens(n, n_vocab=50, seed=0):
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def arrays(tree):
    """All arrays of nested dicts, lists and tuples."""
    if isinstance(tree, np.ndarray):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [a for part in parts for a in arrays(part)]
