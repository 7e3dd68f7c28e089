"""speculative.py: several tokens a pass, and the text or the distribution of one at a time."""

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import PROMPTS
from tiny import random_params, random_tokens

import gpt2
import gpt2_kvcache
import speculative
from sampling import chooser, greedy, sampler
from speculative import Guesser, by_draft, by_lookup, check_draft, how_many, lookup, n_weights, note, passes, stream
from utils import load_encoder_hparams_and_params

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD = random_params(), 3


def drafts(params):
    """Drafts of any quality: random weights, the model itself, its first blocks alone."""
    n_vocab, (n_ctx, n_embd) = len(params["wte"]), params["wpe"].shape
    yield "random", random_params(n_vocab, n_ctx, n_embd, 1, seed=9)
    yield "itself", params
    yield "first blocks", {**params, "blocks": params["blocks"][:1]}


def by_greedy_draft(draft, n_head, params=None, price=0.0):
    """A draft whose guesses count as so many passes over one token; free ones are always made."""
    guesser = by_draft(draft, n_head, chooser(), np.random.default_rng(0))
    return guesser._replace(n_weights=price * n_weights(params) if price else 0)


def gap(tokens, params, n_head, token, other):
    """How far apart the model's logits of two ids are, after these tokens."""
    start = gpt2_kvcache.window_start(len(tokens), len(params["wpe"]))
    logits, _ = gpt2_kvcache.prefill(tokens[start:], params, n_head)
    return abs(float(logits[token] - logits[other]))


def assert_same_greedy_text(prompt, new, expected, params, n_head):
    """Equal ids; or, where two logits lie within 1e-3, a message that shows the gap. -> 1 for such a case, else 0."""
    if new == expected:
        return 0
    i = next(i for i, (a, b) in enumerate(zip(new, expected, strict=False)) if a != b)
    distance = gap([*prompt, *expected[:i]], params, n_head, new[i], expected[i])
    print(f"token {i} differs; the two logits are {distance:.1e} apart")
    assert distance < 1e-3, f"token {i} differs; the two logits are {distance:.1e} apart"
    return 1


def test_greedy_ids_are_those_of_plain_decoding_on_fifty_fairytale_prompts_past_the_window():
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
    n_head, end = hparams["n_head"], encoder.end_of_text
    assert len(PROMPTS) >= 50
    n_close = 0
    for i, text in enumerate(PROMPTS[:50]):
        prompt = encoder.encode(text) or [end]
        expected = gpt2_kvcache.generate(prompt, params, n_head, 300, greedy, end)
        ways = [by_lookup()]
        name, draft = list(drafts(params))[i % 3]
        ways.append(by_greedy_draft(draft, n_head))
        for way in ways:
            new = list(stream(prompt, params, n_head, 300, way, end))
            n_close += assert_same_greedy_text(prompt, new, expected, params, n_head)
    print(f"{n_close} of 100 texts differ where two logits are within 1e-3")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, 30), st.integers(0, 60), st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.9]))
def test_greedy_ids_on_random_models(seed, n_prompt, n_new, guesses, price):
    params, prompt = random_params(n_vocab=7, seed=seed), random_tokens(n_prompt, 7, seed)
    expected = gpt2_kvcache.generate(prompt, params, N_HEAD, n_new)
    assert list(stream(prompt, params, N_HEAD, n_new, by_lookup(), n_guesses=guesses)) == expected
    for _, draft in drafts(params):
        way = by_greedy_draft(draft, N_HEAD, params, price)
        new = list(stream(prompt, params, N_HEAD, n_new, way, n_guesses=guesses))
        assert_same_greedy_text(prompt, new, expected, params, N_HEAD)


def test_sampled_lookup_gives_the_text_of_the_same_seed():
    params, prompt = random_params(n_vocab=7), random_tokens(5, 7)
    for seed in range(10):
        expected = gpt2_kvcache.generate(prompt, params, N_HEAD, 60, sampler(0.3, seed=seed))
        assert list(stream(prompt, params, N_HEAD, 60, by_lookup(sampler(0.3, seed=seed)))) == expected


def test_a_draft_forgets_its_wrong_guesses(monkeypatch):
    """Every logit of the draft is what the draft says after the very text so far, in windows that move, too."""
    params, prompt = random_params(n_vocab=7, n_layer=3), random_tokens(5, 7)
    draft = {**params, "blocks": params["blocks"][:1]}
    seen, prefill = [], gpt2_kvcache.prefill

    def noting(inputs, weights, n_head, kvcache=None):
        logits, kvcache = prefill(inputs, weights, n_head, kvcache)
        if weights is draft:
            seen.append(abs(logits - gpt2.gpt2(inputs, **draft, n_head=n_head)[-1]).max())
        return logits, kvcache

    monkeypatch.setattr(speculative, "prefill", noting)
    turns = itertools.cycle([3, 0, 1, 4])
    monkeypatch.setattr(speculative, "how_many", lambda a, n_most, price=0: min(n_most, next(turns)))
    list(stream(prompt, params, N_HEAD, 60, by_greedy_draft(draft, N_HEAD, params, 0.1)))
    assert len(seen) > 20 and max(seen) < 1e-4


def test_it_stops_before_the_end_of_text():
    params, prompt = random_params(n_vocab=7), random_tokens(5, 7)
    expected = gpt2_kvcache.generate(prompt, params, N_HEAD, 40)
    for end in set(expected):
        for way in (by_lookup(), by_greedy_draft(params, N_HEAD)):
            new = list(stream(prompt, params, N_HEAD, 40, way, end_of_text=end))
            assert new == expected[: expected.index(end)]


N_VOCAB, SETTINGS = 5, {"temperature": 1.3, "top_k": 4, "top_p": 0.97}


def adversarial(logits):
    """A draft's distribution that never proposes its favourite."""
    p = chooser(**SETTINGS)(logits)
    p[p.argmax()] = 0
    return p / p.sum()


@pytest.mark.parametrize("quality", ["good", "bad", "adversarial", "lookup"])
def test_sampled_frequencies_cannot_be_told_from_plain_ones(monkeypatch, quality):
    """20,000 sequences of 3 tokens; chi-square against the exact probabilities, at the 99.9 % quantile.

    Logits and caches of the few prefixes there are get remembered: the model is a pure function.
    """
    params = random_params(n_vocab=N_VOCAB, n_layer=1, seed=4)
    draft = {"good": params, "bad": random_params(n_vocab=N_VOCAB, n_layer=1, seed=5), "adversarial": params}.get(
        quality
    )
    memory = {}

    def remembered(function):
        @functools.wraps(function)
        def call(inputs, *args, **kwargs):
            kvcache = kwargs.get("kvcache") if "kvcache" in kwargs else args[-1] if args else None
            n_past = 0 if kvcache is None else kvcache[0][0].shape[2]
            model = id(kwargs["wte"] if "wte" in kwargs else args[0]["wte"])
            key = (function.__name__, model, tuple(inputs), n_past)
            if key not in memory:
                memory[key] = function(inputs, *args, **kwargs)
            return memory[key]

        return call

    monkeypatch.setattr(speculative, "gpt2", remembered(gpt2_kvcache.gpt2))
    monkeypatch.setattr(speculative, "prefill", remembered(gpt2_kvcache.prefill))
    monkeypatch.setattr(speculative, "how_many", lambda acceptance, n_most, price=0.0: n_most)
    monkeypatch.setattr(speculative, "SHORTEST_NGRAM", 1)
    prompt, to_p, rng, n = [3, 0, 4, 2, 1, 3, 1], chooser(**SETTINGS), np.random.default_rng(3), 20_000
    if quality == "lookup":
        from sampling import draw

        way = by_lookup(lambda logits: draw(to_p(logits), rng))
    else:
        way = by_draft(draft, N_HEAD, adversarial if quality == "adversarial" else to_p, rng)
        if quality == "adversarial":  # the draft is drawn from its own distribution, the model keeps its own
            way = Guesser(way.propose, by_draft(draft, N_HEAD, to_p, rng).verify, 0)
        way = way._replace(n_weights=0)  # guesses are always made
    counts, made = np.zeros(N_VOCAB**3), []
    for _ in range(n):
        made += passes(prompt, params, N_HEAD, 3, way, n_guesses=2)
    texts = np.array([token for one in made for token in one.tokens]).reshape(n, 3)
    np.add.at(counts, texts @ [N_VOCAB**2, N_VOCAB, 1], 1)

    exact = np.zeros(N_VOCAB**3)
    for index in range(N_VOCAB**3):
        ids, p = [index // N_VOCAB**2, index // N_VOCAB % N_VOCAB, index % N_VOCAB], 1.0
        for i, token in enumerate(ids):
            p *= to_p(gpt2_kvcache.prefill(prompt + ids[:i], params, N_HEAD)[0])[token]
        exact[index] = p
    assert exact.sum() == pytest.approx(1) and counts[exact == 0].sum() == 0
    often = n * exact >= 5
    observed, expected = (
        np.append(counts[often], counts[~often].sum()),
        np.append(exact[often], exact[~often].sum()) * n,
    )
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < bound
    n_guessed = sum(one.n_guessed for one in made)
    assert freedom > 30 and n_guessed > n / 2
    share = sum(one.n_accepted for one in made) / n_guessed
    assert share > 0.99 if quality == "good" else 0.05 < share < 0.95


def looked_up(tokens, n):
    return lookup(tokens, n, note({}, tokens, 0))


def test_lookup_finds_what_followed_the_longest_and_then_the_last_match():
    lookup = looked_up
    assert lookup([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert lookup([1, 2, 3, 4, 2, 3, 5, 2, 3], 1) == [5]
    assert lookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1) == [4]
    assert lookup([7, 7, 7, 7], 3) == [7, 7, 7]
    assert lookup([1, 2, 1, 2, 1], 4) == [2, 1, 2, 1]
    assert lookup([1, 2, 3, 4], 3) == lookup([3, 1, 2, 3], 3) == lookup([1], 3) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9))
def test_lookup_with_places_noted_as_the_text_grows_is_a_search_of_the_whole_text(tokens, step):
    places, n_noted = {}, 0
    for n in [*range(1, len(tokens), step), len(tokens)]:
        text = tokens[:n]
        places, n_noted = note(places, text, n_noted), n
        found = [
            (length, end)
            for length in range(2, 7)
            for end in range(length, n)
            if text[:end][-length:] == text[-length:]
        ]
        end = max(found)[1] if found else None
        assert lookup(text, 4, places) == [text[end + i % (n - end)] for i in range(4 if found else 0)]


def test_no_guess_is_made_where_none_pays():
    assert how_many(0.0, 8) == how_many(0.5, 8) == 0
    assert how_many(0.95, 8) == 7 and how_many(0.99, 15) == 15  # 8 or 16 rows: what a product likes
    assert how_many(1.0, 1) == 0  # one token more for more than twice the time
    assert how_many(0.9, 8, cost_of_a_guess=1.0) == 0
    assert how_many(0.999, 300) == 31  # the table ends at 32 rows


def test_passes_are_saved_where_the_text_repeats(monkeypatch):
    passes, real = [], gpt2_kvcache.gpt2
    monkeypatch.setattr(speculative, "gpt2", lambda inputs, **kw: passes.append(1) or real(inputs, **kw))
    params, pattern = random_params(n_ctx=256), [3, 1, 4, 1, 5, 9]
    pick_pattern = iter(pattern * 100)
    new = list(stream(pattern * 3, params, N_HEAD, 180, by_lookup(lambda logits: next(pick_pattern))))
    assert new == (pattern * 100)[:180] and len(passes) < 40


def test_a_wrong_guess_copies_nothing(monkeypatch):
    buffers = set()
    real = gpt2_kvcache.gpt2

    def watched(inputs, **kwargs):
        logits, kvcache = real(inputs, **kwargs)
        buffers.add(id(kvcache[0][0].base))
        return logits, kvcache

    monkeypatch.setattr(speculative, "gpt2", watched)
    monkeypatch.setattr(speculative, "how_many", lambda acceptance, n_most, price=0.0: n_most)
    params = random_params(n_vocab=7, n_ctx=128)
    draft = random_params(n_vocab=7, n_ctx=128, seed=3)
    made = list(passes([1, 2, 3], params, N_HEAD, 100, by_greedy_draft(draft, N_HEAD)))
    assert sum(one.n_accepted for one in made) < sum(one.n_guessed for one in made) and len(buffers) == 1


def test_the_numbers_of_a_pass_are_those_of_its_text():
    params = random_params(n_vocab=7, n_ctx=64)
    made = list(passes([1, 2, 3], params, N_HEAD, 50, by_greedy_draft(random_params(7, 64, seed=3), N_HEAD)))
    assert sum(len(one.tokens) for one in made) == 50
    assert all(len(one.tokens) == one.n_accepted + 1 and one.n_accepted <= one.n_guessed <= 15 for one in made)


def test_a_draft_as_dear_as_the_model_is_hardly_asked(monkeypatch):
    params = random_params(n_vocab=7, n_ctx=512)
    asked, real = [], speculative.prefill
    monkeypatch.setattr(speculative, "prefill", lambda *args: asked.append(1) or real(*args))
    draft = by_draft(params, N_HEAD, chooser(), np.random.default_rng(0))
    assert draft.n_weights == n_weights(params)
    assert len(list(stream([1, 2, 3], params, N_HEAD, 300, draft))) == 300 and len(asked) <= 1 + 300 // 64


def test_a_draft_runs_each_token_once(monkeypatch):
    """Its cache is kept from pass to pass."""
    params, n_run = random_params(n_vocab=7, n_ctx=128), []
    real = gpt2_kvcache.prefill

    def counted(inputs, weights, n_head, kvcache=None):
        if weights is draft:
            n_run.append(len(inputs) - (kvcache[0].kv.shape[2] if kvcache else 0))
        return real(inputs, weights, n_head, kvcache)

    draft = {**params}
    monkeypatch.setattr(speculative, "prefill", counted)
    assert len(list(stream([1, 2, 3, 4, 5], params, N_HEAD, 100, by_greedy_draft(draft, N_HEAD)))) == 100
    assert n_run[0] == 5 and max(n_run[1:]) <= 2  # a pass in which all guesses held adds one that wasn't run


def test_an_empty_prompt_and_strange_ids_are_refused():
    for way in (by_lookup(), by_greedy_draft(PARAMS, N_HEAD)):
        with pytest.raises(ValueError, match="no tokens"):
            list(stream([], PARAMS, N_HEAD, 5, way))
        for bad in ([50], [-1]):
            with pytest.raises(ValueError, match="outside the vocabulary of 50"):
                list(stream(bad, PARAMS, N_HEAD, 5, way))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"n_vocab": 60}, "vocabulary has 60 tokens, the model's 50"),
        ({"n_ctx": 8}, "window has 8 tokens, 16 are needed"),
    ],
)
def test_a_draft_that_cannot_stand_in_is_refused_with_both_numbers(shape, message):
    with pytest.raises(ValueError, match=message):
        check_draft(PARAMS, random_params(**shape), 40)
    check_draft(PARAMS, random_params(n_ctx=8), 8)


def run(script, *arguments):
    command = [sys.executable, script, *map(str, arguments), "--model_size", "fairytale"]
    return subprocess.run(command, cwd=ROOT, capture_output=True)


def test_command_line_prints_the_text_of_the_cached_script():
    options = ["Once upon a time", "--n_tokens_to_generate", 60]
    expected = run("gpt2_kvcache.py", *options)
    for more in ([], ["--draft_model_size", "fairytale"], ["--guesses", 1]):
        result = run("speculative.py", *options, *more)
        assert result.returncode == 0 and result.stdout == expected.stdout != b""
        assert re.search(rb"[\d.]+ tokens a second; \d+ of \d+ guesses accepted\n$", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--guesses", 0], "guesses must be 1 or more, not 0"),
        (["x", "--draft_model_size", "nothing"], "nothing"),
        (["x", "--temperature", -1], "temperature"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message):
    result = run("speculative.py", *arguments)
    *model, line = result.stderr.decode().splitlines()
    assert result.returncode == 2 and result.stdout == b"" and message in line and len(model) <= 1
