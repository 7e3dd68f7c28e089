"""Several prompts together: every step reads the weights once for all of them.

Each sequence keeps a cache of its own, the same value as anywhere else; only the products with the weights run on all
rows at once. A sequence that lacks more than one token (a new prompt, a moved window) catches up by itself first.
"""

import itertools
import json

import numpy as np

from command_line import load, progress, read_text
from gpt2 import layer_norm, linear, window_start
from gpt2_kvcache import attend, check_tokens, ffn, prefill
from kvcache import cached_length, empty_entry
from sampling import check_settings, sampler


def mha(x, c_attn, c_proj, n_head, entries):
    """x: [n_batch, n_embd], the newest token of each sequence; entries: one block's entry for each of them."""
    rows = linear(x, **c_attn)  # [n_batch, n_embd] -> [n_batch, 3*n_embd]
    attended = [attend(rows[i : i + 1], n_head, entry) for i, entry in enumerate(entries)]
    heads = np.concatenate([row for row, _ in attended])  # n_batch of [1, n_embd] -> [n_batch, n_embd]
    return linear(heads, **c_proj), [entry for _, entry in attended]


def gpt2_step(tokens, kvcaches, wte, wpe, blocks, ln_f, n_head):
    """One token for each sequence. tokens: n_batch ids, not cached yet -> logits [n_batch, n_vocab], longer caches."""
    x = wte[np.asarray(tokens)] + wpe[[cached_length(kvcache) for kvcache in kvcaches]]  # [n_batch, n_embd]
    longer = []  # n_layer lists of n_batch entries
    for block, entries in zip(blocks, zip(*kvcaches, strict=True), strict=True):
        attended, entries = mha(layer_norm(x, **block["ln_1"]), **block["attn"], n_head=n_head, entries=entries)
        x = x + attended  # [n_batch, n_embd]
        x = x + ffn(layer_norm(x, **block["ln_2"]), **block["mlp"])
        longer.append(entries)
    logits = layer_norm(x, **ln_f) @ wte.T  # [n_batch, n_embd] -> [n_batch, n_vocab]
    return logits, [list(entries) for entries in zip(*longer, strict=True)]


def caught_up(window, params, n_head, kvcache):
    """The cache of all tokens of the window but the last. Does nothing in the usual case that only that one is new."""
    if kvcache is None:
        n_ctx, n_embd = params["wpe"].shape
        kvcache = [empty_entry(n_head, n_embd // n_head, n_ctx) for _ in params["blocks"]]
    if cached_length(kvcache) < len(window) - 1:
        _, kvcache = prefill(window[:-1], params, n_head, kvcache)
    return kvcache


def stream_batch(requests, params, n_head, n_tokens_to_generate, end_of_text=None, batch_size=16):
    """Yields a list of new ids for each request, in order. At most batch_size run at once; the next joins as one ends.

    requests: pairs (inputs, pick), token ids and a function logits [n_vocab] -> token id. Every request gets the ids
    that gpt2.generate and gpt2_kvcache.generate give it alone.
    """
    if n_tokens_to_generate == 0:
        yield from ([] for _ in requests)
        return
    n_ctx, requests = len(params["wpe"]), enumerate(requests)
    running, ended, n_yielded = [], {}, 0
    trunk = {"inputs": None}  # the last prompt that was run: samples of one prompt branch from its cache
    while True:
        for index, (inputs, pick) in itertools.islice(requests, batch_size - len(running)):
            if inputs != trunk["inputs"]:
                check_tokens(inputs, len(params["wte"]))
                start = window_start(len(inputs), n_ctx)
                trunk = {"inputs": inputs, "start": start, "kvcache": caught_up(inputs[start:], params, n_head, None)}
            running.append({**trunk, "index": index, "pick": pick, "new": []})
        if not running:
            return

        for sequence in running:
            tokens = sequence["inputs"] + sequence["new"]
            start = window_start(len(tokens), n_ctx)
            kvcache = sequence["kvcache"] if start == sequence["start"] else None
            sequence.update(start=start, newest=tokens[-1], kvcache=caught_up(tokens[start:], params, n_head, kvcache))

        newest, kvcaches = ([sequence[key] for sequence in running] for key in ("newest", "kvcache"))
        logits, kvcaches = gpt2_step(newest, kvcaches, **params, n_head=n_head)
        for sequence, row, kvcache in zip(running, logits, kvcaches, strict=True):
            token = sequence["pick"](row)
            sequence["kvcache"] = kvcache
            if token != end_of_text:
                sequence["new"].append(token)
            if token == end_of_text or len(sequence["new"]) == n_tokens_to_generate:
                ended[sequence["index"]] = sequence["new"]
        running = [sequence for sequence in running if sequence["index"] not in ended]
        while n_yielded in ended:
            yield ended.pop(n_yielded)
            n_yielded += 1


def main(
    file: str,
    num_samples: int = 1,
    n_tokens_to_generate: int = 40,
    model_size: str = None,
    models_dir: str = None,
    temperature: float = None,
    top_k: int = None,
    top_p: float = None,
    seed: int = None,
    batch_size: int = 16,
):
    """Continue every line of a file, many at once; print a JSON line {"prompt": ..., "continuation": ...} for each.

    Sample i of a prompt is what the other scripts write with --seed SEED+i.
    """
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    check_settings(temperature, top_k, top_p, seed)
    text = read_text(file)
    if text.strip("\n") == "":
        raise ValueError(f"{file} has no prompts: one a line is wanted")
    prompts = text.removesuffix("\n").split("\n")
    encoder, hparams, params = load(n_tokens_to_generate, model_size, models_dir)
    seeds = [None if seed is None else seed + i for i in range(num_samples)]
    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    requests = (
        (encoder.encode(prompt) or [encoder.end_of_text], sampler(temperature, top_k, top_p, seed))
        for prompt, seed in jobs
    )
    texts = stream_batch(requests, params, hparams["n_head"], n_tokens_to_generate, encoder.end_of_text, batch_size)
    for (prompt, _), new in zip(jobs, progress(texts, len(jobs), "text"), strict=True):
        print(json.dumps({"prompt": prompt, "continuation": encoder.decode(new)}), flush=True)


if __name__ == "__main__":
    from command_line import run

    run(main)
