"""gpt2_kvcache.py: the cache gives what gpt2.py gives, and is a value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import PROMPTS
from tiny import arrays, random_params, random_tokens

import fast
import gpt2
import gpt2_kvcache
from kvcache import Entry, cached_length, empty_entry, extend, truncate, view
from utils import load_encoder_hparams_and_params

PARAMS, N_HEAD, N_CTX = random_params(), 3, 16
TOKENS = random_tokens(N_CTX)


def run(tokens, kvcache=None, **options):
    return gpt2_kvcache.gpt2(tokens, **PARAMS, n_head=N_HEAD, kvcache=kvcache, **options)


def plain(tokens):
    return gpt2.gpt2(tokens, **PARAMS, n_head=N_HEAD)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def contents(kvcache):
    return [kv.copy() for kv, _ in kvcache]


def same(kvcache, kept):
    return all((kv == old).all() and kv.shape == old.shape for (kv, _), old in zip(kvcache, kept, strict=True))


def test_logits_without_a_cache_equal_the_plain_ones():
    np.testing.assert_allclose(run(TOKENS)[0], plain(TOKENS), atol=1e-5)


def test_cached_logits_equal_uncached_one_token_at_a_time():
    kvcache, rows = None, []
    for n in range(1, N_CTX + 1):
        logits, kvcache = run(TOKENS[:n], kvcache)
        assert logits.shape == (1, 50) and cached_length(kvcache) == n
        rows.append(logits[0])
    np.testing.assert_allclose(rows, plain(TOKENS), atol=1e-5)


@st.composite
def model_and_cuts(draw):
    n_head = draw(st.integers(1, 4))
    shape = {"n_embd": n_head * draw(st.integers(1, 8)), "n_layer": draw(st.integers(1, 3))}
    n_ctx = draw(st.integers(1, 24))
    cuts = draw(st.sets(st.integers(1, n_ctx))) | {n_ctx}
    return n_head, random_params(n_ctx=n_ctx, seed=draw(st.integers(0, 99)), **shape), sorted(cuts)


@settings(max_examples=60, deadline=None)
@given(model_and_cuts(), st.integers(0, 99))
def test_any_way_of_cutting_a_sequence_gives_the_logits_of_one_pass(model, seed):
    n_head, params, cuts = model
    tokens, kvcache, pieces = random_tokens(cuts[-1], seed=seed), None, []
    for end in cuts:
        logits, kvcache = gpt2_kvcache.gpt2(tokens[:end], **params, n_head=n_head, kvcache=kvcache)
        pieces.append(logits)
    np.testing.assert_allclose(np.concatenate(pieces), gpt2.gpt2(tokens, **params, n_head=n_head), atol=1e-4)


ACTIONS = st.tuples(st.sampled_from(["extend", "truncate", "forget"]), st.integers(0, 10**6), st.integers(1, 5))


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=25), st.integers(0, 99))
def test_random_trees_of_branch_extend_and_truncate_are_right_at_every_node(actions, seed):
    """Nodes are (tokens, cache, what the cache held). Any node may be extended or cut again at any time, or dropped."""
    rng = np.random.default_rng(seed)
    _, root = run(TOKENS[:3])
    nodes = [(TOKENS[:3], root, contents(root))]
    del root
    for action, which, n in actions:
        index = which % len(nodes)
        tokens, kvcache, kept = nodes[index]
        if action == "forget" and len(nodes) > 1:
            del nodes[index]
        elif action == "truncate":
            n = which % (len(tokens) + 1)
            shorter = truncate(kvcache, n)
            nodes.append((tokens[:n], shorter, contents(shorter)))
            del shorter
        elif action == "extend" and len(tokens) + n <= N_CTX:
            longer = tokens + rng.integers(0, 50, n).tolist()
            logits, extended = run(longer, kvcache)
            np.testing.assert_allclose(logits, plain(longer)[len(tokens) :], atol=1e-4)
            nodes.append((longer, extended, contents(extended)))
            del extended
        del tokens, kvcache, kept
    assert all(same(kvcache, kept) for _, kvcache, kept in nodes)


def test_branching_from_one_cache():
    _, trunk = run(TOKENS[:5])
    kept = contents(trunk)
    first, cache_1 = run([*TOKENS[:5], 7], trunk)
    second, cache_2 = run([*TOKENS[:5], 8, 9], trunk)
    longer, _ = run([*TOKENS[:5], 7, 1], cache_1)
    np.testing.assert_allclose(first, plain([*TOKENS[:5], 7])[5:], atol=1e-5)
    np.testing.assert_allclose(second, plain([*TOKENS[:5], 8, 9])[5:], atol=1e-5)
    np.testing.assert_allclose(longer, plain([*TOKENS[:5], 7, 1])[6:], atol=1e-5)
    assert same(trunk, kept) and cached_length(cache_2) == 7


def test_a_step_copies_nothing_until_the_window_is_full():
    _, kvcache = run(TOKENS[:2])
    for n in range(3, N_CTX + 1):
        _, longer = run(TOKENS[:n], kvcache)
        for (kv, _), (old, _) in zip(longer, kvcache, strict=True):
            assert kv.base is old.base and np.shares_memory(kv[:, :, : n - 1], old)
        kvcache = longer


def test_truncating_copies_nothing_and_neither_does_the_step_after_it_once_the_longer_cache_is_gone():
    _, kvcache = run(TOKENS[:10])
    buffers = [kv.base for kv, _ in kvcache]
    kvcache = truncate(kvcache, 6)
    assert all(kv.base is buffer for (kv, _), buffer in zip(kvcache, buffers, strict=True))
    logits, kvcache = run(TOKENS[:8], kvcache)
    assert all(kv.base is buffer for (kv, _), buffer in zip(kvcache, buffers, strict=True))
    np.testing.assert_allclose(logits, plain(TOKENS[:8])[6:], atol=1e-5)


def test_extending_a_truncated_cache_leaves_the_longer_one_alone():
    _, long = run(TOKENS[:10])
    kept = contents(long)
    run([*TOKENS[:4], 1, 2, 3], truncate(long, 4))
    assert same(long, kept)


def test_a_block_alone_grows_without_a_model_around_it():
    """mha with no cache has no window to reserve; its entry grows all the same."""
    block, x = PARAMS["blocks"][0], np.random.default_rng(0).standard_normal((9, 12), dtype=np.float32)
    expected = gpt2.transformer_block(x, **block, n_head=N_HEAD)
    entry, rows = None, []
    for i in range(9):
        y, entry = gpt2_kvcache.transformer_block(x[i : i + 1], **block, n_head=N_HEAD, kvcache=entry)
        rows.append(y[0])
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_n_logits_projects_the_last_positions_alone():
    everything, _ = run(TOKENS)
    for n in (0, 1, 3):
        logits, kvcache = run(TOKENS, n_logits=n)
        assert logits.shape == (n, 50) and cached_length(kvcache) == N_CTX
        np.testing.assert_allclose(logits, everything[N_CTX - n :], atol=1e-5)


def test_more_logits_than_new_positions_are_those_of_the_new_ones():
    _, kvcache = run(TOKENS[:-2])
    logits, _ = run(TOKENS, kvcache, n_logits=5)
    np.testing.assert_allclose(logits, plain(TOKENS)[-2:], atol=1e-5)


@pytest.mark.parametrize("n_out", [0, 1, 4, 9, None])
def test_a_block_runs_the_last_rows_alone_and_keeps_all_keys(n_out):
    x, block = normal(9, PARAMS["wte"].shape[1]), PARAMS["blocks"][0]
    expected = gpt2.transformer_block(x, **block, n_head=N_HEAD)
    y, (kv, _) = gpt2_kvcache.transformer_block(x, **block, n_head=N_HEAD, n_out=n_out)
    assert kv.shape[2] == 9 and len(y) == (9 if n_out is None else n_out) and y.dtype == np.float32
    np.testing.assert_allclose(y, expected[9 - len(y) :], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_prefill_in_pieces_equals_one_pass(chunk):
    _, kvcache = run(TOKENS[:3])
    for start in (None, kvcache):
        logits, longer = gpt2_kvcache.prefill(TOKENS, PARAMS, N_HEAD, start, chunk)
        assert logits.shape == (50,) and cached_length(longer) == N_CTX
        np.testing.assert_allclose(logits, plain(TOKENS)[-1], atol=1e-5)


def test_a_cache_dropped_by_another_thread_meanwhile_hides_no_longer_one():
    """The list of views then gets shorter while it is gone through."""
    long, views = extend(empty_entry(2, 4, n_room=8), normal(2, 2, 5, 4))
    kept, (short, _) = long.copy(), view(long.base, 3, views)

    def dropped():
        views.remove(dropped)
        return short

    views.insert(0, dropped)
    extend(Entry(short, views), normal(2, 2, 1, 4) + 9)
    assert (long == kept).all()


def test_no_argument_is_changed():
    tokens, before = list(TOKENS[:10]), [a.copy() for a in arrays(PARAMS)]
    _, kvcache = run(tokens[:5])
    kept = contents(kvcache)
    run(tokens, kvcache)
    gpt2_kvcache.generate(tokens, PARAMS, N_HEAD, 20, kvcache=kvcache)
    assert tokens == TOKENS[:10] and same(kvcache, kept)
    assert all((a == b).all() for a, b in zip(arrays(PARAMS), before, strict=True))


def test_every_array_is_float32_on_the_way_to_the_logits(monkeypatch):
    seen = []

    def watched(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            seen.extend(a for a in arrays([args, kwargs, result]) if a.dtype.kind == "f")
            return result

        return call

    for name in (
        "layer_norm",
        "linear",
        "ffn",
        "split_heads",
        "merge_heads",
        "attend",
        "mha",
        "extend",
        "to_vocabulary",
    ):
        monkeypatch.setattr(gpt2_kvcache, name, watched(getattr(gpt2_kvcache, name)))
    for name in ("gelu", "linear", "weighted"):
        monkeypatch.setattr(fast, name, watched(getattr(fast, name)))
    _, kvcache = run(TOKENS[:6])
    _, kvcache = run(TOKENS[:9], kvcache)
    seen.append(run(TOKENS[:10], kvcache)[0])
    assert len(seen) > 200 and {a.dtype for a in seen} == {np.dtype(np.float32)}


@pytest.mark.parametrize("n_ctx", [1, 2, 5, 16])
def test_texts_are_identical_past_the_window(n_ctx):
    params = random_params(n_ctx=n_ctx)
    for n_prompt in (1, 3, 40):
        tokens = random_tokens(n_prompt)
        assert gpt2.generate(tokens, params, 3, 50) == gpt2_kvcache.generate(tokens, params, 3, 50)


def test_generation_goes_on_from_a_given_cache():
    tokens = TOKENS[:8]
    _, kvcache = run(tokens[:5])
    expected = gpt2.generate(tokens, PARAMS, N_HEAD, 20)
    assert gpt2_kvcache.generate(tokens, PARAMS, N_HEAD, 20, kvcache=kvcache) == expected


def test_every_step_but_the_window_move_runs_one_token(monkeypatch):
    run_lengths, real = [], gpt2_kvcache.gpt2

    def counted(inputs, *args, kvcache=None, **kwargs):
        run_lengths.append(len(inputs) - cached_length(kvcache))
        return real(inputs, *args, kvcache=kvcache, **kwargs)

    monkeypatch.setattr(gpt2_kvcache, "gpt2", counted)
    gpt2_kvcache.generate(TOKENS[:4], PARAMS, N_HEAD, 30)
    assert run_lengths == [4] + [1] * 12 + [9] + [1] * 7 + [9] + [1] * 7 + [9]


@pytest.mark.parametrize(
    ("inputs", "n_cached", "message"),
    [
        (TOKENS[:5], 5, "5 positions are cached, inputs has 5"),
        (TOKENS[:5], 8, "8 positions are cached, inputs has 5"),
        ([], None, "0 positions are cached, inputs has 0"),
        (TOKENS + [1], None, "17 tokens, .* n_ctx 16"),
        (TOKENS + [1], 16, "17 tokens, .* n_ctx 16"),
        ([1, 50], None, "token id 50 .* 50"),
        ([1, -1], None, "token id -1 .* 50"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_both_numbers(inputs, n_cached, message):
    kvcache = None if n_cached is None else run(TOKENS[:n_cached])[1]
    with pytest.raises(ValueError, match=message):
        run(inputs, kvcache)


@pytest.mark.parametrize(
    ("shape", "n_head", "message"),
    [
        ({"n_layer": 3}, 3, "cache has 3 blocks, the model 2"),
        ({}, 4, "block 0 .* 3 positions of 4 heads of 3 channels, not 3 of 3 of 4"),
        ({"n_embd": 24}, 3, "block 0 .* 3 positions of 3 heads of 8 channels, not 3 of 3 of 4"),
    ],
)
def test_a_cache_of_another_model_is_refused_with_both_numbers(shape, n_head, message):
    _, kvcache = gpt2_kvcache.gpt2(TOKENS[:3], **random_params(**shape), n_head=n_head)
    with pytest.raises(ValueError, match=message):
        run(TOKENS[:5], kvcache)


def test_every_entry_of_the_cache_is_checked():
    _, kvcache = run(TOKENS[:5])
    _, other = gpt2_kvcache.gpt2(TOKENS[:5], **random_params(n_embd=24), n_head=N_HEAD)
    for mixed in ([kvcache[0], other[1]], [kvcache[0], truncate(kvcache, 3)[1]]):
        with pytest.raises(ValueError, match="block 1"):
            run(TOKENS[:8], mixed)


@pytest.mark.parametrize("n", [-1, 6])
def test_truncating_to_a_length_that_is_not_there_is_refused(n):
    _, kvcache = run(TOKENS[:5])
    with pytest.raises(ValueError, match=f"5 positions to {n}"):
        truncate(kvcache, n)


@pytest.fixture(scope="module")
def fairytale():
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
    return encoder, hparams["n_head"], params


def test_texts_of_fifty_prompts_are_identical(fairytale):
    """tests/compare_texts.py does the same for 600 tokens each, which takes some minutes."""
    encoder, n_head, params = fairytale
    assert len(PROMPTS) >= 50
    for prompt in PROMPTS:
        inputs = encoder.encode(prompt) or [encoder.end_of_text]
        texts = [
            way.generate(inputs, params, n_head, 24, end_of_text=encoder.end_of_text) for way in (gpt2, gpt2_kvcache)
        ]
        assert texts[0] == texts[1], prompt


def test_six_hundred_tokens_are_identical(fairytale):
    encoder, n_head, params = fairytale
    inputs = encoder.encode("Once upon a time")
    assert gpt2.generate(inputs, params, n_head, 600) == gpt2_kvcache.generate(inputs, params, n_head, 600)


@pytest.mark.parametrize("size", [1, 7, 256])
def test_fairytale_logits_over_a_full_window_differ_by_less_than_1e_4(fairytale, size):
    _, n_head, params = fairytale
    tokens, kvcache = random_tokens(256, 2048), None
    expected = gpt2.gpt2(tokens, **params, n_head=n_head)
    for end in [*range(size, 256, size), 256]:
        n_past = cached_length(kvcache)
        logits, kvcache = gpt2_kvcache.gpt2(tokens[:end], **params, n_head=n_head, kvcache=kvcache)
        assert abs(logits - expected[n_past:end]).max() < 1e-4
