"""Several tokens a pass, losslessly: guess the next few, run them all at once, keep those that are right.

A decode step is bounded by reading the weights, and a pass over eight tokens reads them once, as one over a single
token does: it takes less than three times as long. With a cache that is a value a wrong guess costs nothing: `truncate`
forgets it. Guesses come from the text itself (the place where the last few tokens occurred before) or from a smaller
model with the same vocabulary. Sources: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318); prompt
lookup is Apoorv Saxena's (2023).
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpt2 import layers
from gpt2_kvcache import gpt2, prefill, seen
from kvcache import cached_length, truncate
from sampling import at_least, check_settings, checked_tokens, chooser, draw, finite, greedy, is_end, sampler

# What a pass over so many tokens costs, in passes over one, as bench.py measures it: 124M's shape, 256 tokens cached,
# two cores, OpenBLAS's SkylakeX kernels. Two rows take a matrix product, where one takes a vector product that runs at
# the speed of memory; after that, rows are cheap, and 8 or 16 of them cheaper than a few less.
COST_TOKENS = (1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 24, 32)
COST = (1.0, 2.01, 2.05, 2.41, 2.67, 2.4, 2.67, 3.34, 2.95, 3.26, 3.75, 4.41)
LONGEST_NGRAM, SHORTEST_NGRAM = 6, 2
KEPT = 0.85  # how much of the estimated acceptance stays when a guess has held or not
IDLE_PASSES = 64  # after so many passes without a guess, one is tried where guesses cost something


class Guesser(NamedTuple):
    """Where guesses come from, and which of them hold."""

    propose: Callable  # (tokens, start of the window, n, state) -> at most n guessed ids, state
    verify: Callable  # (logits [n_guessed + 1, n_vocab], guessed ids, state) -> the ids that hold and one more, state
    n_weights: int  # how many weights one guess reads


class Pass(NamedTuple):
    """What one pass of the model over several tokens gave."""

    tokens: list  # new ids, none after the text's end
    n_guessed: int
    n_accepted: int


def note(places, tokens, start):
    """places, a dict, with each n-gram that ends at place start of the tokens or later -> the last place where it does.

    Those that end at the last token aren't noted: nothing follows them yet. The dict grows as the text does, in place.
    """
    for end in range(max(start, 1), len(tokens)):
        for length in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
            places[tuple(tokens[end - length : end])] = end
    return places


def lookup(tokens, n, places):
    """Up to n guesses: what followed the last place where the end of the sequence occurred before. places: see note.

    Of all such places the one with the longest match counts (LONGEST_NGRAM ... SHORTEST_NGRAM tokens), then the last.
    """
    for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        end = places.get(tuple(tokens[-length:]))
        if end is not None:
            period = len(tokens) - end  # after the end of the text it begins again
            return [tokens[end + i % period] for i in range(n)]
    return []


def n_weights(params):
    """The number of weights that a pass reads: all but wpe, of which it reads a row."""
    linears = (linear for block in params["blocks"] for part in ("attn", "mlp") for linear in block[part].values())
    return params["wte"].size + sum(linear["w"].size for linear in linears)


def how_many(acceptance, n_most, cost_of_a_guess=0.0):
    """The number of guesses, 0 to n_most, that promises most tokens per time.

    acceptance: the share of guesses that held lately. k guesses give 1 + a + ... + a^k tokens on average (Leviathan et
    al., equation 1). cost_of_a_guess: in passes of the model over one token.
    """
    k = np.arange(min(n_most, COST_TOKENS[-1] - 1) + 1)  # what more of them cost isn't known
    tokens = np.cumsum(acceptance**k)
    return int((tokens / (np.interp(k + 1, COST_TOKENS, COST) + k * cost_of_a_guess)).argmax())


def how_many_to_propose(acceptance, n_most, price, n_idle):
    """All where guesses cost nothing: those that aren't run teach, too. Else those that pay, and one now and then."""
    if price == 0:
        return max(n_most, 1)
    k = how_many(acceptance, n_most, price)
    return min(n_most, 1) if k == 0 and n_idle >= IDLE_PASSES else k


def learned(acceptance, guess, new):
    """The estimated share of guesses that hold, after these ids came where those were guessed."""
    for guessed, token in zip(guess, new, strict=False):
        acceptance = KEPT * acceptance + (1 - KEPT) * (guessed == token)
    return acceptance


def by_lookup(pick=greedy):
    """The Guesser that looks in the text itself.

    Each id is pick's own choice, in the usual order; a guess only decides whether its logits are there already. So the
    text is that of gpt2_kvcache.stream, token for token, sampled or greedy.
    """

    def propose(tokens, start, n, state):
        places, n_noted = state or ({}, 0)
        return lookup(tokens, n, note(places, tokens, n_noted)), (places, len(tokens))

    def verify(rows, guess, state):
        new = []
        for i, row in enumerate(rows):
            new.append(pick(row))
            if i == len(guess) or new[-1] != guess[i]:
                return new, state

    return Guesser(propose, verify, 0)


def by_draft(params, n_head, to_distribution, rng):
    """The Guesser that asks a draft model, whose weights these are.

    to_distribution: logits [n_vocab] -> probabilities [n_vocab]; rng: a numpy.random.Generator. A state is the draft's
    window start, its cache, and the distribution that it drew each guess from.
    """

    def propose(tokens, start, n, state):
        old_start, kvcache, _ = state or (start, None, None)
        window, guess, drawn_from = tokens[start:], [], []
        n_kept = min(cached_length(kvcache), len(window) - 1)
        kvcache = truncate(kvcache, n_kept) if kvcache and start == old_start else None
        for _ in range(n):
            logits, kvcache = prefill(window + guess, params, n_head, kvcache)
            drawn_from.append(to_distribution(finite(logits, layers(window + guess, **params, n_head=n_head))))
            guess.append(draw(drawn_from[-1], rng))
        return guess, (start, kvcache, drawn_from)

    def verify(rows, guess, state):
        start, kvcache, drawn_from = state or (None, None, [])
        new = accepted(rows, guess, drawn_from, to_distribution, rng)
        if drawn_from:  # the cache holds all that was proposed but the last: it keeps what held
            n = cached_length(kvcache)
            state = (start, truncate(kvcache, min(n, n - len(drawn_from) + len(new))), [])
        return new, state

    return Guesser(propose, verify, n_weights(params))


def accepted(rows, guess, drawn_from, to_distribution, rng):
    """The guesses that hold and one id more, distributed as the model's own choices (Leviathan et al., theorem 1).

    rows: the model's logits [n_guess + 1, n_vocab]; drawn_from: the distribution [n_vocab] that each guess is from.
    """
    for i, (token, q) in enumerate(zip(guess, drawn_from, strict=False)):  # perhaps only the first guesses were run
        p = to_distribution(rows[i])  # [n_vocab]
        if rng.random() * q[token] >= p[token]:  # accepted with probability min(1, p / q)
            rest = np.maximum(p - q, 0)  # what q proposes too seldom; drawn from it, the token is as if from p
            return [*guess[:i], draw(rest, rng)]
    return [*guess, draw(to_distribution(rows[len(guess)]), rng)]


def passes(inputs, params, n_head, n_tokens_to_generate, guesser, end_of_text=None, n_guesses=15):
    """Yields a Pass for each time that the weights are read, n_tokens_to_generate tokens in all or up to end_of_text.

    end_of_text: an id, a tuple of ids, or None. n_guesses: how many tokens to guess at most.
    """
    tokens, n_ctx, n_end = checked_tokens(inputs, len(params["wte"])), len(params["wpe"]), len(inputs)
    n_end += n_tokens_to_generate
    price = guesser.n_weights / n_weights(params)  # of a guess, in passes of the model over one token
    kvcache, state, acceptance, n_idle = None, None, 0.8, 0
    while len(tokens) < n_end:
        window, kvcache = seen(tokens, kvcache, n_ctx)
        n_most = min(n_guesses, n_ctx - len(window), n_end - len(tokens) - 1)
        n, guess = how_many_to_propose(acceptance, n_most, price, n_idle), []
        if n:
            guess, state = guesser.propose(tokens, len(tokens) - len(window), n, state)
        n_idle = 0 if guess else n_idle + 1
        run = guess[: how_many(acceptance, min(len(guess), n_most))] if price == 0 else guess
        rows, kvcache = run_ahead(window, run, params, n_head, kvcache)
        new, state = guesser.verify(rows, run, state)
        acceptance = learned(acceptance, guess[: max(len(run), 1)], new)
        kvcache = truncate(kvcache, len(window) + len(new) - 1)
        n_text = next((i for i, token in enumerate(new) if is_end(token, end_of_text)), len(new))
        yield Pass(new[:n_text], len(run), len(new) - 1)
        if n_text < len(new):
            return
        tokens += new


def stream(inputs, params, n_head, n_tokens_to_generate, guesser, end_of_text=None, n_guesses=15):
    """Yields new ids one by one; arguments as in passes."""
    for one in passes(inputs, params, n_head, n_tokens_to_generate, guesser, end_of_text, n_guesses):
        yield from one.tokens


def run_ahead(window, guess, params, n_head, kvcache):
    """Runs what the cache lacks of the window, and the guessed tokens after it.

    -> logits [1 + len(guess), n_vocab] of what follows the window and of what follows each guess, the cache of all.
    """
    if cached_length(kvcache) < len(window) - 1:  # a prompt, or a window that moved
        _, kvcache = prefill(window[:-1], params, n_head, kvcache)
    rows, kvcache = gpt2(window + guess, **params, n_head=n_head, kvcache=kvcache)
    return finite(rows, layers(window + guess, **params, n_head=n_head)), kvcache


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
    inputs, made = encoder.encode_prompt(prompt), []
    if draft_model_size is None:
        guesser = by_lookup(sampler(temperature, top_k, top_p, seed))
    else:
        draft_encoder, draft_hparams, draft = load_encoder_hparams_and_params(draft_model_size, models_dir)
        check_draft(params, draft, len(inputs) + n_tokens_to_generate)
        if draft_encoder.encoder != encoder.encoder:
            raise ValueError(f"the draft {draft_model_size} has another vocabulary than the model")
        to_distribution = chooser(temperature, top_k, top_p)
        guesser = by_draft(draft, draft_hparams["n_head"], to_distribution, np.random.default_rng(seed))

    def new():
        for one in passes(
            inputs, params, hparams["n_head"], n_tokens_to_generate, guesser, encoder.end_of_text, guesses
        ):
            made.append(one)
            yield from one.tokens

    start = time.perf_counter()
    n = write_text(new(), encoder, n_tokens_to_generate)
    rate, n_guessed = n / (time.perf_counter() - start), sum(one.n_guessed for one in made)
    n_accepted = sum(one.n_accepted for one in made)
    print(f"{rate:.1f} tokens a second; {n_accepted} of {n_guessed} guesses accepted", file=sys.stderr)


if __name__ == "__main__":
    from command_line import run

    run(main)
