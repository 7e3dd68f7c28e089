"""Several prompts together: every step reads the weights once for all of them.

Each sequence keeps a cache of its own, the same value as anywhere else. The products with the weights run on the new
rows of all sequences at once, one row of most and all of a short prompt that has just joined; attention runs on the
rows of each. A long prompt, or a window that moved, catches up by itself first.
"""

import itertools
import json
import math

import numpy as np

from command_line import progress, read_text
from fast import ffn, linear, to_vocabulary
from gpt2 import is_end, layer_norm, split_heads, window_start
from gpt2_kvcache import attend, cache_with_room, prefill
from kvcache import cached_length, check_tokens, extend
from sampling import at_least, check_settings, sampler
from utils import load_encoder_hparams_and_params

JOIN = 32  # a sequence that lacks more tokens than these runs them by itself: so many rows use the weights well enough


def attend_one_each(qkv, n_head, entries):
    """gpt2_kvcache.attend for one new token of each sequence. qkv: [n_batch, 3*n_embd] -> [n_batch, n_embd], entries.

    The scores of all stand in one array, the shorter ones filled up, so that softmax goes through them once.
    """
    qkv = split_heads(qkv, n_head)  # [n_batch, 3*n_embd] -> [3, n_head, n_batch, d_head]
    q = qkv[0] / math.sqrt(qkv.shape[3])  # [n_head, n_batch, d_head]
    entries = [extend(entry, qkv[1:, :, i : i + 1]) for i, entry in enumerate(entries)]
    n_seq = [kv.shape[2] for kv, _ in entries]
    scores = np.full((len(entries), n_head, 1, max(n_seq)), -np.inf, np.float32)  # [n_batch, n_head, 1, longest n_seq]
    for i, ((k, _), _) in enumerate(entries):
        np.matmul(q[:, i : i + 1], k.transpose(0, 2, 1), out=scores[i, :, :, : n_seq[i]])  # [n_head, 1, n_seq]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    heads = np.empty((len(entries), n_head, 1, q.shape[2]), np.float32)  # [n_batch, n_head, 1, d_head]
    for i, ((_, v), _) in enumerate(entries):
        np.matmul(scores[i, :, :, : n_seq[i]], v, out=heads[i])  # [n_head, 1, d_head]
    heads /= scores.sum(axis=-1, keepdims=True)  # [n_batch, n_head, 1, d_head]
    return heads.reshape(len(entries), -1), entries  # [n_batch, n_head, 1, d_head] -> [n_batch, n_embd]


def attend_all(qkv, ends, n_head, entries):
    """gpt2_kvcache.attend for the rows of each sequence. qkv: [n_rows, 3*n_embd] -> [n_rows, n_embd], entries."""
    if len(qkv) == len(entries):
        return attend_one_each(qkv, n_head, entries)
    rows = np.split(qkv, ends[:-1])  # [n_rows, 3*n_embd] -> n_batch of [n_new, 3*n_embd]
    attended = [attend(new, n_head, entry) for new, entry in zip(rows, entries, strict=True)]
    heads = np.concatenate([heads for heads, _ in attended])  # n_batch of [n_new, n_embd] -> [n_rows, n_embd]
    return heads, [entry for _, entry in attended]


def mha(x, ends, c_attn, c_proj, n_head, entries):
    """x: [n_rows, n_embd], the new tokens of each sequence up to its end; entries: one block's entry for each."""
    heads, entries = attend_all(linear(x, **c_attn), ends, n_head, entries)  # [n_rows, n_embd] -> the same
    return linear(heads, **c_proj), entries


def gpt2_step(new, kvcaches, wte, wpe, blocks, ln_f, n_head):
    """Runs the new tokens of every sequence. -> logits after the last of each [n_batch, n_vocab], the longer caches.

    new: for each sequence the ids that its cache lacks, n_rows in all.
    """
    ends = np.cumsum([len(tokens) for tokens in new])  # [n_batch]
    n_past = [cached_length(kvcache) for kvcache in kvcaches]
    positions = np.concatenate(
        [np.arange(n, n + len(tokens)) for n, tokens in zip(n_past, new, strict=True)]
    )  # [n_rows]
    x = wte[np.concatenate(new)] + wpe[positions]  # [n_rows, n_embd]
    longer = []  # n_layer lists of n_batch entries
    for block, entries in zip(blocks, zip(*kvcaches, strict=True), strict=True):
        attended, entries = mha(layer_norm(x, **block["ln_1"]), ends, **block["attn"], n_head=n_head, entries=entries)
        x = x + attended  # [n_rows, n_embd]
        x = x + ffn(layer_norm(x, **block["ln_2"]), **block["mlp"])
        longer.append(entries)
    x = layer_norm(x[ends - 1], **ln_f)  # [n_rows, n_embd] -> [n_batch, n_embd]
    logits = to_vocabulary(x, wte)  # [n_batch, n_embd] -> [n_batch, n_vocab]
    return logits, [list(entries) for entries in zip(*longer, strict=True)]


def caught_up(window, params, n_head, kvcache, n_left, n_more):
    """The cache, extended by all tokens of the window but the last if it lacks more than n_left of them.

    n_more: how many tokens will come after the window, for which a new cache has room.
    """
    if kvcache is None:
        kvcache = cache_with_room(len(window) + n_more, params, n_head)
    if len(window) - cached_length(kvcache) > n_left:
        _, kvcache = prefill(window[:-1], params, n_head, kvcache)
    return kvcache


def with_caches(requests, params, n_head, n_more):
    """Yields (inputs, pick, kvcache). Requests in a row for one prompt branch from one run of it; others have None."""
    for inputs, group in itertools.groupby(requests, key=lambda request: request[0]):
        check_tokens(inputs, len(params["wte"]))
        picks, window = [pick for _, pick in group], inputs[window_start(len(inputs), len(params["wpe"])) :]
        kvcache = caught_up(window, params, n_head, None, 1, n_more) if len(picks) > 1 else None
        for pick in picks:
            yield inputs, pick, kvcache


def stream_batch(requests, params, n_head, n_tokens_to_generate, end_of_text=None, batch_size=16):
    """Yields a list of new ids for each request, in order. At most batch_size run at once; the next joins as one ends.

    requests: pairs (inputs, pick), token ids and a function logits [n_vocab] -> token id. Every request gets the ids
    that gpt2.generate and gpt2_kvcache.generate give it alone.
    """
    if n_tokens_to_generate == 0:
        yield from ([] for _ in requests)
        return
    n_ctx, waiting = len(params["wpe"]), enumerate(with_caches(requests, params, n_head, n_tokens_to_generate))
    running, ended, n_yielded = [], {}, 0
    while True:
        for index, (inputs, pick, kvcache) in itertools.islice(waiting, batch_size - len(running)):
            start = window_start(len(inputs), n_ctx)
            sequence = {"index": index, "tokens": list(inputs), "n_inputs": len(inputs), "pick": pick}
            running.append({**sequence, "start": start, "kvcache": kvcache})
        if not running:
            return

        new, kvcaches = [], []
        for sequence in running:
            start = window_start(len(sequence["tokens"]), n_ctx)
            if start != sequence["start"]:
                sequence.update(start=start, kvcache=None)
            window = sequence["tokens"][start:]
            kvcache = caught_up(window, params, n_head, sequence["kvcache"], JOIN, n_tokens_to_generate)
            kvcaches.append(kvcache)
            new.append(window[cached_length(kvcache) :])

        logits, kvcaches = gpt2_step(new, kvcaches, **params, n_head=n_head)
        for sequence, row, kvcache in zip(running, logits, kvcaches, strict=True):
            token = sequence["pick"](row)
            if not is_end(token, end_of_text):
                sequence["tokens"].append(token)
            sequence["kvcache"] = kvcache
            text = sequence["tokens"][sequence["n_inputs"] :]
            if is_end(token, end_of_text) or len(text) == n_tokens_to_generate:
                ended[sequence["index"]] = text
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
    at_least(1, num_samples=num_samples, batch_size=batch_size)
    at_least(0, n_tokens_to_generate=n_tokens_to_generate)
    check_settings(temperature, top_k, top_p, seed)
    text = read_text(file)
    if text.strip("\n") == "":
        raise ValueError(f"{file} has no prompts: one a line is wanted")
    prompts = text.removesuffix("\n").split("\n")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    seeds = [None if seed is None else seed + i for i in range(num_samples)]
    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    requests = ((encoder.encode_prompt(prompt), sampler(temperature, top_k, top_p, seed)) for prompt, seed in jobs)
    texts = stream_batch(requests, params, hparams["n_head"], n_tokens_to_generate, encoder.end_of_text, batch_size)
    for (prompt, _), new in zip(jobs, progress(texts, len(jobs), "text"), strict=True):
        print(json.dumps({"prompt": prompt, "continuation": encoder.decode(new)}), flush=True)


if __name__ == "__main__":
    from command_line import run

    run(main)
