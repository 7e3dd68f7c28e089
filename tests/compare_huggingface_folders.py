"""Draws folders in Hugging Face's layout at random and compares what is read from them with transformers.

pip install -r requirements.txt torch==2.13.0 transformers==5.24.0
python tests/compare_huggingface_folders.py [N_FOLDERS [FIRST_SEED]]    # golden: writes golden/huggingface/drawn.json

For each: ids and text of 24 texts, logits within 1e-4, greedy text of a prompt and of none; the same once more after
transformers has saved the folder anew, and after export.py has. Where one refuses, the other has to.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from folders import GOLDEN, draw, texts  # noqa: E402
from transformers import GPT2LMHeadModel, GPT2Tokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging  # noqa: E402

import export  # noqa: E402
import gpt2  # noqa: E402
import gpt2_kvcache  # noqa: E402
import utils  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()
PROMPT, N_NEW, N_GOLDEN = "Once", 8, 24


def load_theirs(folder):
    settings = folder / "tokenizer_config.json"
    plain = settings.exists() and json.loads(settings.read_text())["tokenizer_class"] not in (
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
    )
    tokenizer = (PreTrainedTokenizerFast if plain else GPT2Tokenizer).from_pretrained(folder)
    return tokenizer, GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()


def run_theirs(tokenizer, model, seed):
    """What transformers reads: see the keys. An id that the model lacks counts as refused (None)."""
    n_vocab = model.config.vocab_size
    encoded = [tokenizer.encode(text) for text in texts(seed)]
    named = model.generation_config.eos_token_id
    ends = [i for i in (named if isinstance(named, list) else [named]) if i is not None and i < n_vocab]
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]  # generate() never ends then; a text does, at its tokenizer's end
    begins = [
        i for i in (model.generation_config.bos_token_id, tokenizer.bos_token_id) if i is not None and i < n_vocab
    ]

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy() if ids and max(ids) < n_vocab else None

    def greedy(ids):
        ids = ids or begins[:1]
        if not ids or max(ids) >= n_vocab:
            return None
        settings = {"max_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0}
        tokens = torch.tensor([ids])
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0].tolist()[len(ids) :]
        return new[: next((i for i, token in enumerate(new) if token in ends), len(new))]

    prompt = tokenizer.encode(PROMPT)
    new = [greedy(prompt), greedy(tokenizer.encode(""))]
    return {
        "ids": [ids if max(ids, default=0) < n_vocab else None for ids in encoded],
        "decoded": [tokenizer.decode(ids) for ids in encoded],
        "pieces": [tokenizer.decode([i]) for i in range(n_vocab)],
        "logits": logits(prompt),
        "new": new,
        "text": [None if ids is None else tokenizer.decode(ids) for ids in new],
    }


def run_ours(folder, seed):
    with contextlib.redirect_stderr(io.StringIO()):
        encoder, hparams, params = utils.load_model(folder)
    n_head = hparams["n_head"]

    def ids_of(text, encode=encoder.encode):
        try:
            return encode(text)
        except ValueError:
            return None

    prompts = [ids_of(text, encoder.encode_prompt) for text in (PROMPT, "")]
    new = [
        ids and gpt2_kvcache.generate(ids, params, n_head, N_NEW, end_of_text=encoder.end_of_text) for ids in prompts
    ]
    encoded = [ids_of(text) for text in texts(seed)]
    return {
        "ids": encoded,
        "decoded": [None if ids is None else encoder.decode(ids) for ids in encoded],
        "pieces": [encoder.decode([i]) for i in range(hparams["n_vocab"])],
        "logits": prompts[0] and gpt2.gpt2(prompts[0], **params, n_head=n_head),
        "new": new,
        "text": [None if ids is None else encoder.decode(ids) for ids in new],
    }


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def difference(theirs, ours):
    """What differs, "" if nothing. Both are dicts, or the errors of who refused."""
    if isinstance(theirs, str) or isinstance(ours, str):
        return "" if type(theirs) is type(ours) else f"one refuses: {theirs:.300}" if isinstance(theirs, str) else ours
    for key, value in theirs.items():
        if key == "logits":
            if (value is None) != (ours[key] is None) or value is not None and np.abs(value - ours[key]).max() > 1e-4:
                return "logits"
        elif key == "decoded":
            value = [text for text, ids in zip(value, theirs["ids"], strict=True) if ids is not None]
            if value != [text for text, ids in zip(ours[key], ours["ids"], strict=True) if ids is not None]:
                return key
        elif value != ours[key]:
            pairs = [(a, b) for a, b in zip(value, ours[key], strict=True) if a != b]
            return f"{key}: {pairs[0]} ({len(pairs)})"
    return ""


def compare(seed, root):
    """(what transformers made of the folder of a seed, a list of (way of saving, difference))."""
    folder, anew, exported = root / "models" / str(seed), root / "anew" / str(seed), root / "exported" / str(seed)
    draw(seed, folder)
    loaded = outcome(load_theirs, folder)
    if isinstance(loaded, str):
        return loaded, [("drawn", difference(loaded, outcome(run_ours, folder, seed)))]
    theirs = outcome(run_theirs, *loaded, seed)
    found = [("drawn", difference(theirs, outcome(run_ours, folder, seed)))]
    if outcome(lambda: [part.save_pretrained(anew) for part in loaded]).__class__ is list:  # not all that runs is saved
        again = outcome(lambda: run_theirs(*load_theirs(anew), seed))
        found.append(("saved anew", difference(again, outcome(run_ours, anew, seed))))
    with contextlib.redirect_stderr(io.StringIO()):
        export.export(exported, str(seed), root / "models")
    found.append(("exported", difference(theirs, outcome(lambda: run_theirs(*load_theirs(exported), seed)))))
    return theirs, found


def main(n_folders=200, first_seed=0):
    wrong, refused, ended = 0, 0, 0
    with tempfile.TemporaryDirectory() as root:
        for seed in range(first_seed, first_seed + n_folders):
            theirs, found = compare(seed, Path(root))
            refused += isinstance(theirs, str)
            ended += not isinstance(theirs, str) and any(ids is not None and len(ids) < N_NEW for ids in theirs["new"])
            for way, what in found:
                wrong += bool(what)
                if what:
                    print(f"folder {seed}, {way}: {what[:400]}")
    print(f"{n_folders} folders: {wrong} differences; {refused} refused by both, {ended} with a text that ends early")


def write_golden():
    """What transformers makes of the first folders that it reads."""
    golden = {}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(10 * N_GOLDEN):
            theirs, _ = compare(seed, Path(root))
            if not isinstance(theirs, str) and len(golden) < N_GOLDEN:
                logits = theirs.pop("logits")
                del theirs["pieces"]
                golden[seed] = theirs | {"logits": None if logits is None else logits[-1].round(5).tolist()[:40]}
    lines = ",\n".join(f'"{seed}": {json.dumps(content)}' for seed, content in golden.items())
    (GOLDEN / "drawn.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    write_golden() if sys.argv[1:] == ["golden"] else main(*map(int, sys.argv[1:]))
