"""Several prompts together: every step reads the weights once for all of them.

Each sequence keeps a cache of its own, the same value as anywhere else. The products with the weights run on the new
rows of all sequences at once, one row of most and all of a short prompt that has just joined; attention runs on the
rows of each. A long prompt, or a window that moved, is first run by itself.
"""

import itertools
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from command_line import read_input, with_bar
from fast import attention_of_each, ffn, layer_norm, linear, to_vocabulary
from gpt2 import layers, split_heads
from gpt2_kvcache import attend, prefill, seen
from kvcache import cached_length, empty_cache, extend, truncate
from sampling import at_least, check_settings, checked_tokens, finite, is_end, sampler
from utils import load_encoder_hparams_and_params

MOST_TOGETHER = 32  # a sequence that lacks more tokens runs them by itself: so many rows use the weights well enough


class Sequence(NamedTuple):
    """A text on its way. Each step makes a new one."""

    index: int  # of the request that it answers
    n_inputs: int
    tokens: list  # the prompt's ids and the new ones
    pick: Callable  # logits [n_vocab] -> id
    kvcache: list | None


def attend_all(qkv, ends, n_head, entries):
    """gpt2_kvcache.attend for the rows of each sequence. qkv: [n_rows, 3*n_embd] -> [n_rows, n_embd], entries."""
    if len(qkv) == len(entries):  # one new token of each
        qkv = split_heads(qkv, n_head)  # [n_batch, 3*n_embd] -> [3, n_head, n_batch, d_head]
        entries = [extend(entry, qkv[1:, :, i : i + 1]) for i, entry in enumerate(entries)]
        return attention_of_each(qkv[0], [entry.kv for entry in entries]), entries
    rows = np.split(qkv, ends[:-1])  # [n_rows, 3*n_embd] -> n_batch of [n_new, 3*n_embd]
    heads, entries = zip(*(attend(*one) for one in zip(rows, itertools.repeat(n_head), entries)), strict=True)
    return np.concatenate(heads), entries  # n_batch of [n_new, n_embd] -> [n_rows, n_embd]


def mha(x, ends, c_attn, c_proj, n_head, entries):
    """x: [n_rows, n_embd], the new tokens of each sequence up to its end; entries: one block's entry for each."""
    heads, entries = attend_all(linear(x, **c_attn), ends, n_head, entries)  # [n_rows, n_embd] -> the same
    return linear(heads, **c_proj), entries


def gpt2_of_each(new, kvcaches, wte, wpe, blocks, ln_f, n_head):
    """Runs the new tokens of every sequence. -> logits after the last of each [n_batch, n_vocab], the longer caches.

    new: for each sequence the ids that its cache lacks, n_rows in all.
    """
    ends = np.cumsum([len(tokens) for tokens in new])  # [n_batch]
    starts = [cached_length(kvcache) for kvcache in kvcaches]  # n_batch positions
    positions = [np.arange(len(tokens)) + start for tokens, start in zip(new, starts, strict=True)]
    x = wte[np.concatenate(new)] + wpe[np.concatenate(positions)]  # [n_rows, n_embd]
    longer = []  # n_layer lists of n_batch entries
    for block, entries in zip(blocks, zip(*kvcaches, strict=True), strict=True):
        attended, entries = mha(layer_norm(x, **block["ln_1"]), ends, **block["attn"], n_head=n_head, entries=entries)
        x = x + attended  # [n_rows, n_embd]
        x = x + ffn(layer_norm(x, **block["ln_2"]), **block["mlp"])
        longer.append(entries)
    x = layer_norm(x[ends - 1], **ln_f)  # [n_rows, n_embd] -> [n_batch, n_embd]
    logits = to_vocabulary(x, wte)  # [n_batch, n_embd] -> [n_batch, n_vocab]
    return logits, [list(entries) for entries in zip(*longer, strict=True)]


def with_prompt(window, kvcache, params, n_head, n_left, n_more):
    """The cache of the window, but for n_left tokens at most that a step with others is to run.

    n_more: how many tokens will come after the window, for which a new cache has room.
    """
    if kvcache is None:
        kvcache = empty_cache(params["blocks"], n_head, min(len(window) + n_more, len(params["wpe"])))
    if len(window) - cached_length(kvcache) > n_left:
        _, kvcache = prefill(window[:-1], params, n_head, kvcache)
    return kvcache


def n_alike(window, other):
    """How many tokens of a window, the last left out, are worth running once for this one and another; 0 if none are.

    Those that they begin with alike, if a step together wouldn't run them anyway, or if they are the whole window.
    """
    n = len(window) - 1
    n = next((i for i, (a, b) in enumerate(zip(window[:n], other, strict=False)) if a != b), min(n, len(other)))
    return n if n > MOST_TOGETHER or n == len(window) - 1 else 0


def sequences(requests, params, n_head, n_more):
    """Yields a Sequence for each request. Prompts in a row that begin alike branch from one run of their beginning."""
    n_vocab, n_ctx, trunk, kvcache = len(params["wte"]), len(params["wpe"]), [], None
    for index, ((inputs, pick), following) in enumerate(itertools.pairwise(itertools.chain(requests, [([], None)]))):
        tokens = checked_tokens(inputs, n_vocab)
        window, _ = seen(tokens, None, n_ctx)
        n, n_next = n_alike(window, trunk), n_alike(window, seen(list(following[0]), None, n_ctx)[0])
        if n_next > n:  # more of it is shared with the next one than with those before
            known = truncate(kvcache, n) if n else None
            n, trunk = n_next, window[:n_next]
            whole = [*trunk, window[n]]  # with_prompt leaves the last token out
            kvcache = with_prompt(whole, known, params, n_head, n_left=1, n_more=len(window) - n + n_more)
        elif n == 0:
            trunk, kvcache = [], None
        yield Sequence(index, len(tokens), tokens, pick, truncate(kvcache, n) if n else None)


def step(running, params, n_head, n_more):
    """The sequences with one more token each."""
    new, kvcaches, windows = [], [], []
    for sequence in running:
        window, kvcache = seen(sequence.tokens, sequence.kvcache, len(params["wpe"]))
        kvcaches.append(with_prompt(window, kvcache, params, n_head, MOST_TOGETHER, n_more))
        new.append(window[cached_length(kvcaches[-1]) :])
        windows.append(window)
    logits, kvcaches = gpt2_of_each(new, kvcaches, **params, n_head=n_head)
    longer = []
    for sequence, window, row, kvcache in zip(running, windows, logits, kvcaches, strict=True):
        token = sequence.pick(finite(row, layers(window, **params, n_head=n_head)))
        longer.append(sequence._replace(tokens=[*sequence.tokens, token], kvcache=kvcache))
    return longer


def stream_batch(requests, params, n_head, n_tokens_to_generate, end_of_text=None, batch_size=16):
    """Yields a list of new ids for each request, in order. At most batch_size run at once; the next joins as one ends.

    One request more than run is read, to see how much of its prompt it shares.

    requests: pairs (inputs, pick), token ids and a function logits [n_vocab] -> token id. Every request gets the ids
    that gpt2.generate and gpt2_kvcache.generate give it alone, but for rounding where two ids are all but equal.
    end_of_text: an id, a tuple of ids, or None.
    """
    at_least(0, n_tokens_to_generate=n_tokens_to_generate)
    at_least(1, batch_size=batch_size)
    if n_tokens_to_generate == 0:
        yield from ([] for inputs, _ in requests if checked_tokens(inputs, len(params["wte"])))
        return
    waiting, running = sequences(requests, params, n_head, n_tokens_to_generate), []
    ended, n_yielded = {}, 0
    while running := [*running, *itertools.islice(waiting, batch_size - len(running))]:
        running = step(running, params, n_head, n_tokens_to_generate)
        for sequence in running:
            text = sequence.tokens[sequence.n_inputs :]
            if is_end(text[-1], end_of_text):
                ended[sequence.index] = text[:-1]
            elif len(text) == n_tokens_to_generate:
                ended[sequence.index] = text
        running = [sequence for sequence in running if sequence.index not in ended]
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
    text = read_input(file)
    if text.strip("\n") == "":
        raise ValueError(f"{file} has no prompts: one a line is wanted")
    prompts = text.removesuffix("\n").split("\n")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    seeds = [None if seed is None else seed + i for i in range(num_samples)]
    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    requests = ((encoder.encode_prompt(prompt), sampler(temperature, top_k, top_p, seed)) for prompt, seed in jobs)
    texts = stream_batch(requests, params, hparams["n_head"], n_tokens_to_generate, encoder.end_of_text, batch_size)
    for (prompt, _), new in zip(jobs, with_bar(texts, len(jobs), "text"), strict=True):
        print(json.dumps({"prompt": prompt, "continuation": encoder.decode(new)}), flush=True)


if __name__ == "__main__":
    from command_line import run

    run(main)
