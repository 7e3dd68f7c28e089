"""How the bundled model was made: vocabulary, training, checkpoint. Three commands, each one step of the way.

    pip install torch==2.13.0 tokenizers fire
    python models/fairytale/train.py vocabulary CORPUS     writes encoder.json, vocab.bpe, hparams.json
    python models/fairytale/train.py train CORPUS RUN      writes RUN/weights.npz (hours on two cores)
    pip install tensorflow-cpu                             (an environment of its own is safer)
    python models/fairytale/train.py export RUN            writes model.ckpt.* and checkpoint with real TensorFlow

CORPUS is a folder with train.txt and valid.txt: UTF-8 documents, each ended by a line <|endoftext|>.
Nothing here is needed to run or to test the engine.
"""

import json
import math
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
HPARAMS = {"n_vocab": 2048, "n_ctx": 256, "n_embd": 160, "n_head": 5, "n_layer": 4}
END = "<|endoftext|>"


def read_documents(path):
    """The documents of a corpus file, without their separators."""
    return Path(path).read_text(encoding="utf-8").split(f"\n{END}\n")[:-1]


def byte_level_bpe(**model):
    """An untrained (or, given vocab and merges, ready) GPT-2 style tokenizer of the `tokenizers` library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def vocabulary(corpus):
    """Learn the merges on train.txt and write them in OpenAI's two files: 256 bytes, merges, <|endoftext|> last."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=HPARAMS["n_vocab"] - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(read_documents(Path(corpus) / "train.txt"), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in learned["merges"])
    (HERE / "vocab.bpe").write_text("#version: 0.2\n" + merges, encoding="utf-8", newline="\n")
    (HERE / "encoder.json").write_text(json.dumps(learned["vocab"] | {END: HPARAMS["n_vocab"] - 1}), encoding="utf-8")
    (HERE / "hparams.json").write_text(json.dumps(HPARAMS, indent=2) + "\n", encoding="utf-8")


def token_stream(path):
    """All documents of a file as one row of ids, <|endoftext|> before, between and after them."""
    import torch

    merges = [tuple(line.split()) for line in (HERE / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]]
    vocab = json.loads((HERE / "encoder.json").read_text(encoding="utf-8"))
    tokenizer, end = byte_level_bpe(vocab=vocab, merges=merges), vocab[END]
    return torch.tensor([end] + [i for e in tokenizer.encode_batch(read_documents(path)) for i in (*e.ids, end)])


def initial_weights(seed):
    """GPT-2's initialisation: N(0, 0.02), projections into the residual stream smaller by sqrt(2 * n_layer)."""
    import torch

    generator, n_embd, n_layer = torch.Generator().manual_seed(seed), HPARAMS["n_embd"], HPARAMS["n_layer"]

    def normal(*shape, std=0.02):
        return torch.randn(shape, generator=generator) * std

    def norm():
        return {"g": torch.ones(n_embd), "b": torch.zeros(n_embd)}

    def linear(n_in, n_out, std=0.02):
        return {"w": normal(n_in, n_out, std=std), "b": torch.zeros(n_out)}

    def block():
        small = 0.02 / math.sqrt(2 * n_layer)
        attn = {"c_attn": linear(n_embd, 3 * n_embd), "c_proj": linear(n_embd, n_embd, small)}
        mlp = {"c_fc": linear(n_embd, 4 * n_embd), "c_proj": linear(4 * n_embd, n_embd, small)}
        return {"ln_1": norm(), "attn": attn, "ln_2": norm(), "mlp": mlp}

    tree = {"wte": normal(HPARAMS["n_vocab"], n_embd), "wpe": normal(HPARAMS["n_ctx"], n_embd, std=0.01)}
    return tree | {"ln_f": norm()} | {f"h{i}": block() for i in range(n_layer)}


def flatten(tree, prefix="model"):
    """{'h0': {'ln_1': {'g': ...}}} -> {'model/h0/ln_1/g': ...}, the checkpoint's names."""
    flat = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}/{name}") if isinstance(value, dict) else {f"{prefix}/{name}": value}
    return flat


def loss(tree, inputs, targets):
    """Mean cross-entropy in nats. inputs, targets: [n_batch, n_seq] ids; bfloat16 products, float32 everything else."""
    import torch
    import torch.nn.functional as F

    n_embd, n_head = HPARAMS["n_embd"], HPARAMS["n_head"]

    def norm(x, g, b):
        return F.layer_norm(x, (n_embd,), g, b, eps=1e-5)

    def linear(x, w, b):
        return x @ w + b

    x = tree["wte"][inputs] + tree["wpe"][: inputs.shape[1]]
    for i in range(HPARAMS["n_layer"]):
        block = tree[f"h{i}"]
        qkv = linear(norm(x, **block["ln_1"]), **block["attn"]["c_attn"]).float()
        # [n_batch, n_seq, 3*n_embd] -> 3 x [n_batch, n_head, n_seq, d_head]
        q, k, v = (t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in qkv.split(n_embd, -1))
        with torch.autocast("cpu", enabled=False):
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(heads.transpose(1, 2).flatten(2), **block["attn"]["c_proj"])
        hidden = F.gelu(linear(norm(x, **block["ln_2"]), **block["mlp"]["c_fc"]), approximate="tanh")
        x = x + linear(hidden, **block["mlp"]["c_proj"])
    logits = norm(x, **tree["ln_f"]) @ tree["wte"].T  # [n_batch, n_seq, n_vocab]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def windows(stream, n_batch, seed):
    """Endless [n_batch, n_ctx + 1] pieces of the stream: every epoch cuts it at a new offset, in a new order."""
    import torch

    generator, n_ctx = torch.Generator().manual_seed(seed), HPARAMS["n_ctx"]
    while True:
        offset = int(torch.randint(n_ctx, (), generator=generator))
        starts = torch.arange(offset, len(stream) - n_ctx, n_ctx)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for batch in starts[: len(starts) // n_batch * n_batch].view(-1, n_batch):
            yield stream[batch[:, None] + torch.arange(n_ctx + 1)]


def train(corpus, run, steps=24_000, n_batch=8, lr=0.006, weight_decay=0.1, warmup=200, decay=0.6, seed=0):
    """Muon (Keller Jordan 2024, as in torch.optim) on the blocks' matrices, AdamW on the rest; lr falls to 0 at last.

    run: folder for weights.npz, and for state.pt, from which a broken run goes on.
    decay: the share of the steps, at the end, over which both learning rates fall linearly to 0.
    """
    import torch

    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    train_stream, valid_stream = (token_stream(Path(corpus) / name) for name in ("train.txt", "valid.txt"))
    n_ctx = HPARAMS["n_ctx"]
    valid = valid_stream[: (len(valid_stream) - 1) // n_ctx * n_ctx + 1]
    valid_inputs, valid_targets = valid[:-1].view(-1, n_ctx), valid[1:].view(-1, n_ctx)
    valid_bytes = sum(len(d.encode()) for d in read_documents(Path(corpus) / "valid.txt"))

    tree = initial_weights(seed)
    flat = {name: w.requires_grad_() for name, w in flatten(tree).items()}
    matrices = [w for name, w in flat.items() if w.ndim == 2 and "/h" in name]
    others = [w for name, w in flat.items() if not (w.ndim == 2 and "/h" in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    factor = lambda step: min(1, (step + 1) / warmup, (steps - step) / (decay * steps))  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]
    start, state = 0, run / "state.pt"
    if state.exists():
        saved = torch.load(state)
        start = saved["step"]
        with torch.no_grad():
            for name, w in flat.items():
                w.copy_(saved["weights"][name])
        for part, content in zip(optimizers + schedules, saved["parts"], strict=True):
            part.load_state_dict(content)

    compiled, began = torch.compile(loss), time.time()
    batches = windows(train_stream, n_batch, seed + start)
    for step in range(start, steps):
        batch = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = compiled(tree, batch[:, :-1], batch[:, 1:])
        value.backward()
        for part in optimizers + schedules:
            part.step()
        for w in flat.values():
            w.grad = None
        if (step + 1) % 500 == 0 or step + 1 == steps:
            with torch.no_grad():
                batches_of_8 = zip(valid_inputs.split(8), valid_targets.split(8), strict=True)
                nats = sum(loss(tree, i, t) * i.numel() for i, t in batches_of_8)
            bits = float(nats) / math.log(2) / valid_bytes
            print(f"{step + 1} {time.time() - began:.0f}s train {value:.3f} valid {bits:.4f} bits/byte", flush=True)
            weights = {name: w.detach() for name, w in flat.items()}
            torch.save(
                {"step": step + 1, "weights": weights, "parts": [p.state_dict() for p in optimizers + schedules]}, state
            )
    np.savez(run / "weights.npz", **{name: w.detach().numpy() for name, w in flat.items()})


def export(run):
    """RUN/weights.npz -> model.ckpt.data-00000-of-00001, model.ckpt.index, checkpoint, beside this file."""
    import tensorflow as tf

    with np.load(Path(run) / "weights.npz") as weights:
        # OpenAI's matrices inside the blocks have a leading dimension of 1 (they are kernels of 1D convolutions)
        arrays = {n: weights[n][None] if weights[n].ndim == 2 and "/h" in n else weights[n] for n in weights.files}
    names = sorted(arrays)
    tf.raw_ops.SaveV2(
        prefix=str(HERE / "model.ckpt"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[arrays[name] for name in names],
    )
    (HERE / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\nall_model_checkpoint_paths: "model.ckpt"\n')


if __name__ == "__main__":
    import fire

    fire.Fire({"vocabulary": vocabulary, "train": train, "export": export})
