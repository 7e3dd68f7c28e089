"""Writes tests/golden/huggingface: folders by transformers' save_pretrained, with its logits and its tokenizers' ids.

Its answers.json is written by compare_huggingface_folders.py.

pip install -r requirements.txt torch==2.13.0 transformers==5.24.0
python tests/make_huggingface_golden.py
"""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from tiny import random_tokens
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

HERE = Path(__file__).resolve().parent
FAIRYTALE, OUT = HERE.parent / "models" / "fairytale", HERE / "golden" / "huggingface"
N_MERGES = 120


def first_merges(folder):
    """The bundled vocabulary's bytes, first merges and "<|endoftext|>", as vocab.json and merges.txt."""
    ids = json.loads((FAIRYTALE / "encoder.json").read_text())
    version, *merges = (FAIRYTALE / "vocab.bpe").read_text().splitlines()
    pieces = sorted(ids, key=ids.get)[:256] + [merge.replace(" ", "") for merge in merges[:N_MERGES]]
    pieces = list(dict.fromkeys(pieces)) + ["<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}, indent=0))
    (folder / "merges.txt").write_text("\n".join([version, *merges[:N_MERGES]]) + "\n")
    return len(pieces)


def model(seed, **config):
    torch.manual_seed(seed)
    shape = {"n_positions": 16, "n_embd": 12, "n_layer": 3, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**(shape | config))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (".ln" in name and name.endswith("weight")))
    model.tie_weights()
    return model


def logits(model, n_vocab):
    with torch.no_grad():
        return model(torch.tensor([random_tokens(16, n_vocab)])).logits[0].numpy()  # [n_seq, n_vocab]


def strings(n=300):
    rng = random.Random(0)
    parts = ["the king", "New York", " New York", "<pad>", "<|endoftext|>", "<x>", "<x>y", "<x", "é", "ñandú", "中文"]
    parts += ["👑", " ", "  ", "\n", "\t", "\u00a0", "\u2003", "\x1c", "\x85", "'s", "'LL", "'re", "1234", "½", "٣"]
    parts += ["...", "e\u0301"]
    parts += ["Once upon a time", " there was", "<", "|", ">", "\0", "\u200d", "ſ", "ω", "\ufeff"]
    texts = ["", *parts]
    while len(texts) < n:
        texts.append("".join(rng.choice(parts) for _ in range(rng.randint(1, 7))))
    return texts


for name in ("sharded", "bf16", "settings"):
    shutil.rmtree(OUT / name, ignore_errors=True)
golden = {}

# Shards, the tokenizer as transformers 5 saves it.
n_vocab = first_merges(OUT / "sharded")
sharded = model(1, vocab_size=n_vocab)
tokenizers = {"sharded": GPT2Tokenizer.from_pretrained(OUT / "sharded")}
sharded.save_pretrained(OUT / "sharded", max_shard_size="16KB")
tokenizers["sharded"].save_pretrained(OUT / "sharded")
for name in ("vocab.json", "merges.txt"):
    (OUT / "sharded" / name).unlink()
golden["sharded"] = logits(sharded, n_vocab)

# bfloat16, n_inner; vocab.json, merges.txt and added_tokens.json, as older versions saved them.
first_merges(OUT / "bf16")
bf16 = model(2, vocab_size=n_vocab + 5, n_inner=20).to(torch.bfloat16)
(OUT / "bf16" / "added_tokens.json").write_text(json.dumps({"<pad>": n_vocab, "New York": n_vocab + 1}))
tokenizers["bf16"] = GPT2Tokenizer.from_pretrained(OUT / "bf16")
bf16.save_pretrained(OUT / "bf16")
golden["bf16"] = logits(bf16.float(), n_vocab)

# Every setting that is honoured, no "transformer." in the names, a vocabulary with added tokens of both kinds.
first_merges(OUT / "settings")
settings = {"layer_norm_epsilon": 0.03, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
settings |= {"activation_function": "gelu_pytorch_tanh", "reorder_and_upcast_attn": True, "n_inner": 31}
tokenizer = tokenizers["settings"] = GPT2Tokenizer.from_pretrained(OUT / "settings")
tokenizer.add_tokens(["New York", "<x>y", "ñandú"])
tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<x>"]})
changed = model(3, vocab_size=len(tokenizer) + 3, **settings)
changed.transformer.save_pretrained(OUT / "settings")
tokenizer.save_pretrained(OUT / "settings")
for name in ("vocab.json", "merges.txt"):
    (OUT / "settings" / name).unlink()
golden["settings"] = logits(changed, n_vocab)

np.savez_compressed(OUT / "logits.npz", **golden)
texts = strings()
ids = {name: [tokenizer.encode(text) for text in texts] for name, tokenizer in tokenizers.items()}
(OUT / "ids.json").write_text(json.dumps({"texts": texts, **ids}) + "\n")
