"""Several tokens a pass, losslessly: guess the next few, run them all at once, keep those that are right.

A decode step is bounded by reading the weights, and a pass over eight tokens reads them once, as one over a single
token does: it takes less than three times as long. With a cache that is a value a wrong guess costs nothing: `truncate`
forgets it. Guesses come from the text itself (the place where the last few tokens occurred before) or from a smaller
model with the same vocabulary. Sources: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318); prompt
lookup is Apoorv Saxena's (2023).
"""

import sys
import time

import numpy as np

from gpt2 import is_end, window_start
from gpt2_kvcache import gpt2, prefill
from kvcache import cached_length, truncate
from sampling import at_least, check_settings, chooser, draw, greedy, sampler

# What a pass over so many tokens costs, in passes over one: 124M's shape, 256 tokens cached, two cores, NumPy 2.4's
# OpenBLAS, medians of 21 rounds. Two rows take a matrix product, where one takes a vector product that runs at the
# speed of memory; after that, rows are cheap, and 8 or 16 of them cheaper than a few less.
COST_TOKENS = (1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 24, 32)
COST = (1.0, 2.14, 2.37, 2.82, 2.91, 2.55, 2.85, 3.6, 3.0, 3.42, 3.75, 4.13)
LONGEST_NGRAM, SHORTEST_NGRAM = 6, 2
MEMORY = 0.85  # how much of the estimated acceptance stays when a new observation comes in
PROBE = 64  # after so many passes without a guess, one is tried where guesses cost something


def lookup(tokens, n):
    """Up to n guesses: what followed the last place where the end of the sequence occurred before.

    Of all such places the one with the longest match counts (LONGEST_NGRAM ... SHORTEST_NGRAM tokens), then the last.
    """
    best, best_length = None, SHORTEST_NGRAM - 1
    for end in range(len(tokens) - 1, 0, -1):
        if tokens[end - 1] != tokens[-1]:
            continue
        length = 1
        while length < min(LONGEST_NGRAM, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
        if length == LONGEST_NGRAM:
            break
    period = [] if best is None else tokens[best:]  # after the end of the text it begins again
    return [period[i % len(period)] for i in range(n)] if period else []


def how_many(acceptance, n_most, cost_of_a_guess=0.0):
    """The number of guesses, 0 to n_most, that promises most tokens per time.

    acceptance: the share of guesses that held lately. k guesses give 1 + a + ... + a^k tokens on average (Leviathan et
    al., equation 1). cost_of_a_guess: in passes of the model over one token.
    """
    k = np.arange(n_most + 1)
    tokens = np.cumsum(acceptance**k)
    return int((tokens / (np.interp(k + 1, COST_TOKENS, COST) + k * cost_of_a_guess)).argmax())


def by_lookup(pick=greedy):
    """propose and verify, as `stream` wants them, for guesses out of the text itself.

    Each id is pick's own choice, in the usual order; a guess only decides whether its logits are there already. So the
    text is that of gpt2_kvcache.stream, token for token, sampled or greedy.
    """

    def propose(tokens, start, n, state):
        return lookup(tokens, n), None

    def verify(rows, guess, state):
        new = []
        for i, row in enumerate(rows):
            new.append(pick(row))
            if i == len(guess) or new[-1] != guess[i]:
                return new, None

    return propose, verify


def by_draft(params, n_head, to_distribution, rng):
    """propose and verify for guesses of a draft model, whose weights these are.

    to_distribution: logits [n_vocab] -> probabilities [n_vocab]; rng: a numpy.random.Generator. A state is the draft's
    window start, its cache, and the distribution that it drew each guess from.
    """

    def propose(tokens, start, n, state):
        old_start, kvcache, _ = state or (start, None, None)
        window, guess, drawn_from = tokens[start:], [], []
        kvcache = (
            truncate(kvcache, min(cached_length(kvcache), len(window) - 1)) if start == old_start and kvcache else None
        )
        for _ in range(n):
            logits, kvcache = prefill(window + guess, params, n_head, kvcache)
            drawn_from.append(to_distribution(logits))
            guess.append(draw(drawn_from[-1], rng))
        return guess, (start, kvcache, drawn_from)

    def chosen(rows, guess, drawn_from):
        """The guesses that hold and one id more. rows: [n_guess + 1, n_vocab], drawn_from: a list of [n_vocab]."""
        for i, token in enumerate(guess):
            q = drawn_from[i]  # [n_vocab]
            p = to_distribution(rows[i])  # [n_vocab]
            if rng.random() * q[token] >= p[token]:  # accepted with probability min(1, p / q)
                rest = np.maximum(p - q, 0)  # what q proposes too seldom; drawn from it, the token is as if from p
                return [*guess[:i], draw(rest / rest.sum(), rng)]
        return [*guess, draw(to_distribution(rows[len(guess)]), rng)]

    def verify(rows, guess, state):
        start, kvcache, drawn_from = state or (None, None, [])
        new = chosen(rows, guess, drawn_from)
        if drawn_from:  # the cache holds all that was proposed but the last: it keeps what held
            n = cached_length(kvcache)
            state = (start, truncate(kvcache, min(n, n - len(drawn_from) + len(new))), [])
        return new, state

    return propose, verify


def stream(
    inputs, params, n_head, n_tokens_to_generate, propose, verify, end_of_text=None, guesses=15, price=0.0, counts=None
):
    """Yields new ids as gpt2_kvcache.stream does, several a pass where guesses hold.

    propose(tokens, start, n, state) -> up to n guessed ids, state. verify(logits [n_guess + 1, n_vocab], guess, state)
    -> the guesses that hold and one id of the model's own, state. start is the place where the window begins.
    guesses: how many at most; fewer or none are run while few are accepted. price: what one guess costs, in passes of
    the model over one token. counts: a dict that receives the numbers of "guessed" and "accepted" tokens.
    """
    tokens, n_ctx, n_end = list(inputs), len(params["wpe"]), len(inputs) + n_tokens_to_generate
    start, kvcache, state, acceptance, n_idle = window_start(len(tokens), n_ctx), None, None, 0.8, 0
    while len(tokens) < n_end:
        if window_start(len(tokens), n_ctx) != start:
            start, kvcache = window_start(len(tokens), n_ctx), None
        n_most = min(guesses, n_ctx - (len(tokens) - start), n_end - len(tokens) - 1)
        k, guess = how_many(acceptance, n_most, price), []
        n_idle = 0 if k else n_idle + 1
        if price == 0:
            guess, state = propose(tokens, start, max(n_most, 1), state)
            k = how_many(acceptance, min(len(guess), n_most))
        elif k or (n_idle >= PROBE and n_most):  # guesses that nobody makes teach nothing: one is tried now and then
            k, n_idle = max(k, 1), 0
            guess, state = propose(tokens, start, k, state)
        rows, kvcache = run_ahead(tokens[start:], guess[:k], params, n_head, kvcache)
        new, state = verify(rows, guess[:k], state)
        n_held = len(new) - 1
        for i in range(min(max(k, 1), len(guess), n_held + 1)):  # free guesses teach even where none was run
            acceptance = MEMORY * acceptance + (1 - MEMORY) * (guess[i] == new[i])
        kvcache = truncate(kvcache, len(tokens) - start + n_held)
        count(counts, guessed=min(k, len(guess)), accepted=n_held)
        for token in new:
            if is_end(token, end_of_text):
                return
            tokens.append(token)
            yield token


def run_ahead(window, guess, params, n_head, kvcache):
    """Runs what the cache lacks of the window, and the guessed tokens after it.

    -> logits [1 + len(guess), n_vocab] of what follows the window and of what follows each guess, the cache of all.
    """
    if cached_length(kvcache) < len(window) - 1:  # a prompt, or a window that moved
        _, kvcache = prefill(window[:-1], params, n_head, kvcache)
    return gpt2(window + guess, **params, n_head=n_head, kvcache=kvcache)


def count(counts, **numbers):
    for name, n in numbers.items() if counts is not None else ():
        counts[name] = counts.get(name, 0) + n


def check_draft(params, draft, n_needed):
    """ValueError for a draft that can't stand in for the model; n_needed: tokens of prompt and text together."""
    n_vocab, n_draft_vocab = len(params["wte"]), len(draft["wte"])
    if n_vocab != n_draft_vocab:
        raise ValueError(
            f"the draft's vocabulary has {n_draft_vocab} tokens, the model's {n_vocab}; it must be the same"
        )
    window = min(len(params["wpe"]), n_needed)
    if len(draft["wpe"]) < window:
        raise ValueError(f"the draft's window has {len(draft['wpe'])} tokens, {window} are needed")


def n_weights(params):
    """The number of weights that a pass reads: all but wpe, of which it reads a row."""
    return sum(layer["w"].size for b in params["blocks"] for part in ("attn", "mlp") for layer in b[part].values()) + (
        params["wte"].size
    )


def main(
    prompt: str,
    n_tokens_to_generate: int = 40,
    model_size: str = None,
    models_dir: str = None,
    temperature: float = None,
    top_k: int = None,
    top_p: float = None,
    seed: int = None,
    draft_model_size: str = None,
    guesses: int = 15,
):
    """Continue a prompt with GPT-2, several tokens a pass where the next ones can be guessed."""
    from command_line import write_text
    from utils import load_encoder_hparams_and_params

    at_least(0, n_tokens_to_generate=n_tokens_to_generate)
    at_least(1, guesses=guesses)
    check_settings(temperature, top_k, top_p, seed)
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    inputs, price, counts = encoder.encode_prompt(prompt), 0.0, {}
    if draft_model_size is None:
        propose, verify = by_lookup(sampler(temperature, top_k, top_p, seed))
    else:
        draft_encoder, draft_hparams, draft = load_encoder_hparams_and_params(draft_model_size, models_dir)
        check_draft(params, draft, len(inputs) + n_tokens_to_generate)
        if draft_encoder.encoder != encoder.encoder:
            raise ValueError(f"the draft {draft_model_size} has another vocabulary than the model")
        price = n_weights(draft) / n_weights(params)
        to_distribution = chooser(temperature, top_k, top_p)
        propose, verify = by_draft(draft, draft_hparams["n_head"], to_distribution, np.random.default_rng(seed))
    new = stream(
        inputs,
        params,
        hparams["n_head"],
        n_tokens_to_generate,
        propose,
        verify,
        encoder.end_of_text,
        guesses,
        price,
        counts,
    )
    start = time.perf_counter()
    n = write_text(new, encoder, n_tokens_to_generate)
    rate, guessed = n / (time.perf_counter() - start), counts.get("guessed", 0)
    print(f"{rate:.1f} tokens a second; {counts.get('accepted', 0)} of {guessed} guesses accepted", file=sys.stderr)


if __name__ == "__main__":
    from command_line import run

    run(main)
