"""Writes 300 greedy tokens after 50 prompts with guesses of every kind and compares them with plain decoding.

    .venv/bin/python tests/compare_guesses.py

Guesses come from the text (lookup) and from three drafts, which always guess 4 tokens here, right or wrong. The test
suite does the same with one of the drafts for each prompt. Takes some minutes; prints how many texts differ (only where
two logits lie within 1e-3 may they) and, for the first 20 prompts, what held and what it gained.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from prompts import PROMPTS  # noqa: E402
from test_speculative import assert_same_greedy_text, by_greedy_draft, drafts  # noqa: E402

import gpt2_kvcache  # noqa: E402
import speculative  # noqa: E402
from sampling import greedy  # noqa: E402
from utils import load_encoder_hparams_and_params  # noqa: E402

encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
n_head, end, adaptive = hparams["n_head"], encoder.end_of_text, speculative.how_many
differ, held, guessed, gains = (dict.fromkeys(("lookup", *(name for name, _ in drafts(params))), 0) for _ in range(4))


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


for i, text in enumerate(PROMPTS[:50]):
    prompt = encoder.encode(text) or [end]
    expected, plain = timed(lambda p=prompt: gpt2_kvcache.generate(p, params, n_head, 300, greedy, end))
    ways = {name: by_greedy_draft(draft, n_head, params, 0.1) for name, draft in drafts(params)}
    ways |= {"lookup": speculative.by_lookup()}
    for name, way in ways.items():
        speculative.how_many = adaptive if name == "lookup" else lambda acceptance, n_most, price=0: min(n_most, 4)
        made, seconds = timed(lambda p=prompt, way=way: list(speculative.passes(p, params, n_head, 300, way, end)))
        new = [token for one in made for token in one.tokens]
        differ[name] += assert_same_greedy_text(prompt, new, expected, params, n_head)
        if i < 20:
            held[name] += sum(one.n_accepted for one in made)
            guessed[name] += sum(one.n_guessed for one in made)
            gains[name] += plain / seconds / 20
for name in differ:
    print(
        f"{name:14}{differ[name]} of 50 texts differ; on 20 prompts {held[name]} of {guessed[name]} guesses held, ",
        end="",
    )
    print(f"{gains[name]:.2f} x plain decoding on average")
