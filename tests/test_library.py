"""What the public functions take and refuse, alike in all of them; models that compute NaN or infinity."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import random_params, random_tokens

import batch
import gpt2
import gpt2_kvcache
import speculative
from export import export
from sampling import chooser, greedy, sampler

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD = random_params(), 3
WAYS = {
    "gpt2": lambda tokens, params=PARAMS, **kw: gpt2.generate(tokens, params, N_HEAD, 9, **kw),
    "gpt2_kvcache": lambda tokens, params=PARAMS, **kw: gpt2_kvcache.generate(tokens, params, N_HEAD, 9, **kw),
    "batch": lambda tokens, params=PARAMS, pick=greedy, **kw: next(
        batch.stream_batch([(tokens, pick), (tokens, pick)], params, N_HEAD, 9, **kw)
    ),
    "lookup": lambda tokens, params=PARAMS, pick=greedy, **kw: list(
        speculative.stream(tokens, params, N_HEAD, 9, speculative.by_lookup(pick), **kw)
    ),
    "draft": lambda tokens, params=PARAMS, pick=greedy, **kw: list(
        speculative.stream(tokens, params, N_HEAD, 9, free_draft(params), **kw)
    ),
}


def free_draft(params):
    guesser = speculative.by_draft(params, N_HEAD, chooser(), np.random.default_rng(0))
    return guesser._replace(n_weights=0)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint16)])
def test_ids_come_as_lists_or_integer_arrays(way, kind):
    tokens = random_tokens(6)
    new = way(kind(tokens))
    assert new == gpt2.generate(tokens, PARAMS, N_HEAD, 9) and {type(token) for token in new} == {int}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("tokens", "why"), [([], "no tokens"), ([3, -1], "id -1"), ([50], "id 50"), (np.zeros(0), "no")]
)
def test_an_empty_prompt_and_ids_outside_the_vocabulary_are_refused(way, tokens, why):
    with pytest.raises(ValueError, match=why):
        way(tokens)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_text_ends_at_any_of_several_ids(way):
    tokens = random_tokens(6)
    whole = way(tokens)
    others = tuple(set(range(50)) - set(whole))[:3]
    for end in set(whole):
        expected = whole[: whole.index(end)]
        assert way(tokens, end_of_text=(*others, end)) == way(tokens, end_of_text=(end,)) == expected
    assert way(tokens, end_of_text=others) == way(tokens, end_of_text=()) == whole


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("pick", [greedy, sampler(1.0, top_k=9, seed=0)])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        (("wte",), "wte"),
        (("wpe",), "wte and wpe"),
        (("blocks", 0, "ln_1", "g"), "block 0, attn"),
        (("blocks", 1, "attn", "c_proj", "w"), "block 1, attn"),
        (("blocks", 1, "mlp", "c_fc", "b"), "block 1, mlp"),
        (("ln_f", "b"), "ln_f"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_model_that_computes_nan_says_where_it_begins(way, pick, place, where, value):
    params = copy.deepcopy(PARAMS)
    *path, last = place
    node = params
    for key in path:
        node = node[key]
    node[last][(0,) * node[last].ndim] = value
    with pytest.raises(FloatingPointError, match=where):
        way([0, 1, 2], params, pick=pick)


def test_a_negative_count_is_refused_at_once():
    with pytest.raises(ValueError, match="n_tokens_to_generate must be 0 or more, not -1"):
        list(batch.stream_batch([([1], greedy)], PARAMS, N_HEAD, -1))
    with pytest.raises(ValueError, match="batch_size must be 1 or more, not 0"):
        list(batch.stream_batch([([1], greedy)], PARAMS, N_HEAD, 3, batch_size=0))


def test_scores_of_any_size_hide_what_comes_later():
    """A mask of -1e10 would lose against scores below it."""
    params = copy.deepcopy(PARAMS)
    for block in params["blocks"]:
        block["attn"]["c_attn"]["w"] *= np.float32(1e6)
    tokens = random_tokens(12)
    whole = gpt2.gpt2(tokens, **params, n_head=N_HEAD)
    cached, _ = gpt2_kvcache.gpt2(tokens, **params, n_head=N_HEAD)
    for n in (1, 5, 9):
        np.testing.assert_allclose(whole[:n], gpt2.gpt2(tokens[:n], **params, n_head=N_HEAD), atol=1e-3)
        np.testing.assert_allclose(cached[:n], whole[:n], atol=1e-3)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """models_dir with a model whose last layer norm holds a NaN, and a text."""
    models = tmp_path_factory.mktemp("models")
    export(models / "nan", "fairytale")
    weights = load_file(models / "nan" / "model.safetensors")
    weights["transformer.ln_f.weight"][3] = np.nan
    save_file(weights, models / "nan" / "model.safetensors", metadata={"format": "pt"})
    (models / "text").write_text("Once upon a time\n")
    return models


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--top_p", "0.9"]])
@pytest.mark.parametrize("script", ["gpt2.py", "gpt2_kvcache.py", "speculative.py", "batch.py", "evaluate.py"])
def test_a_diverged_model_ends_in_one_line_and_status_1(diverged, script, options):
    text = str(diverged / "text") if script in ("batch.py", "evaluate.py") else "Once upon a time"
    command = [sys.executable, script, text, "--model_size", "nan", "--models_dir", str(diverged)]
    result = subprocess.run(
        command + options * (script != "evaluate.py"), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    named, said = result.stderr.splitlines()
    assert result.returncode == 1 and result.stdout == "" and "model nan" in named
    assert said.startswith(f"{script}: the model computes NaN or infinity, first in ln_f")
