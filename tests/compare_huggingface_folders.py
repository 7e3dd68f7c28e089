"""Draws folders in Hugging Face's layout at random and compares what is read from them with transformers.

pip install -r requirements.txt torch==2.13.0 transformers==5.24.0
python tests/compare_huggingface_folders.py [N_FOLDERS [FIRST_SEED]]    # golden: writes golden/huggingface/answers.json

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

import torch  # noqa: E402
from folders import CASES, GOLDEN, N_NEW, PROMPT, difference, draw, outcome, read, texts, write_case  # noqa: E402
from transformers import GPT2LMHeadModel, GPT2Tokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging  # noqa: E402

from export import export  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()
N_GOLDEN = 20  # folders whose results the suite compares with


def load_theirs(folder):
    path = folder / "tokenizer_config.json"
    kind = json.loads(path.read_text()).get("tokenizer_class") if path.exists() else None
    plain = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
    tokenizer = (PreTrainedTokenizerFast if plain else GPT2Tokenizer).from_pretrained(folder)
    return tokenizer, GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()


def ask(tokenizer, model, texts):
    """folders.read of transformers' own tokenizer and model. An id that the model lacks counts as refused."""
    n_vocab = model.config.vocab_size
    encoded = [tokenizer.encode(text) for text in texts]
    named = model.generation_config.eos_token_id
    ends = [i for i in (named if isinstance(named, list) else [named]) if i is not None and i < n_vocab]
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]  # generate() never ends then; a text does, at its tokenizer's end
    begins = [
        i for i in (model.generation_config.bos_token_id, tokenizer.bos_token_id) if i is not None and i < n_vocab
    ]

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1, ::21].numpy() if ids and max(ids) < n_vocab else None

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
        "pieces": [tokenizer.decode([i]) for i in range(300, n_vocab)],
        "logits": logits(prompt),  # of the last position, every 21st
        "new": new,
        "text": [None if ids is None else tokenizer.decode(ids) for ids in new],
    }


def compare(seed, root):
    """(what transformers made of the folder of a seed, a list of (way of saving, difference))."""
    folder, anew, exported = root / "models" / str(seed), root / "anew" / str(seed), root / "exported" / str(seed)
    draw(seed, folder)
    loaded = outcome(load_theirs, folder)
    if isinstance(loaded, str):
        return loaded, [("drawn", difference(loaded, outcome(read, folder, texts(seed))))]
    theirs = outcome(ask, *loaded, texts(seed))
    found = [("drawn", difference(theirs, outcome(read, folder, texts(seed))))]
    if isinstance(outcome(lambda: [part.save_pretrained(anew) for part in loaded]), list):  # not all that runs is saved
        again = outcome(lambda: ask(*load_theirs(anew), texts(seed)))
        found.append(("saved anew", difference(again, outcome(read, anew, texts(seed)))))
    with contextlib.redirect_stderr(io.StringIO()):
        export(exported, str(seed), root / "models")
    found.append(("exported", difference(theirs, outcome(lambda: ask(*load_theirs(exported), texts(seed))))))
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
    """Writes what transformers makes of the first drawn folders that it reads, and of folders.CASES."""
    golden = {}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(N_GOLDEN):
            draw(seed, Path(root) / str(seed))
            golden[str(seed)] = ask(*load_theirs(Path(root) / str(seed)), texts(seed, 12))
        for name in CASES:
            golden[name] = ask(*load_theirs(write_case(name, Path(root) / name)), CASES[name].texts)
    for content in golden.values():
        content["logits"] = (
            content["logits"] if content["logits"] is None else [round(float(x), 5) for x in content["logits"]]
        )
    lines = [f"{json.dumps(name)}: {json.dumps(content, ensure_ascii=False)}" for name, content in golden.items()]
    (GOLDEN / "answers.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden() if sys.argv[1:] == ["golden"] else main(*map(int, sys.argv[1:]))
