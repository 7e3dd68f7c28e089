"""Writes seeded texts in every way and counts those that differ from the text written with the cache, alone.

    .venv/bin/python tests/compare_seeded_texts.py [400]

So many texts (400 by default) of 200 tokens at temperature 1, and as many with top_p 0.95; with the cache, without it,
guessed by lookup, and in batches of 16, each with one BLAS thread and with two. A number of threads holds for a
process, so each way runs in a process of its own. The way without the cache takes most of the time, an hour or more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from prompts import PROMPTS  # noqa: E402

import batch  # noqa: E402
import gpt2  # noqa: E402
import gpt2_kvcache  # noqa: E402
import speculative  # noqa: E402
from sampling import sampler  # noqa: E402
from utils import load_encoder_hparams_and_params  # noqa: E402

SETTINGS = {"temperature 1": {"temperature": 1.0}, "top_p 0.95": {"top_p": 0.95}}
WAYS = "with the cache", "in batches", "by lookup", "without the cache"


def write_all(way, settings, n_texts):
    """A list of n_texts lists of token ids. Text i follows prompt i, counted round, with seed i."""
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
    prompts = [encoder.encode(prompt) or [encoder.end_of_text] for prompt in PROMPTS]
    requests = [(prompts[i % len(prompts)], sampler(seed=i, **settings)) for i in range(n_texts)]
    model = params, hparams["n_head"], 200
    if way == "in batches":
        return list(batch.stream_batch(requests, *model, batch_size=16))
    if way == "by lookup":
        return [list(speculative.stream(p, *model, speculative.by_lookup(pick))) for p, pick in requests]
    module = gpt2_kvcache if way == "with the cache" else gpt2
    return [module.generate(prompt, *model, pick) for prompt, pick in requests]


def main(n_texts=400):
    for name, settings in SETTINGS.items():
        expected = None
        for way in WAYS:
            for n_threads in (1, 2):
                command = [sys.executable, __file__, way, json.dumps(settings), str(n_texts)]
                env = {**os.environ, "OPENBLAS_NUM_THREADS": str(n_threads)}
                result = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
                texts = json.loads(result.stdout)
                expected = expected or texts
                n_different = sum(a != b for a, b in zip(expected, texts, strict=True))
                print(f"{name}, {way}, {n_threads} BLAS threads: {n_different} of {n_texts} texts differ", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:  # one way, in a process of its own
        print(json.dumps(write_all(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
    else:
        main(*map(int, sys.argv[1:]))
