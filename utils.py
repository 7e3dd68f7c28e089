"""From a model's name to (encoder, hparams, params): which folder, is all there, does all fit together."""

import contextlib
import json
import sys
from pathlib import Path

from encoder import get_encoder
from errors import DamagedFile
from model_files import huggingface, huggingface_tokenizer
from model_files.checkpoint import load_weights
from model_files.download import SIZES, download

MODELS_DIR = Path(__file__).resolve().parent / "models"
BUNDLED = MODELS_DIR / "fairytale"


def load_encoder_hparams_and_params(model_size=None, models_dir=None):
    """(encoder, hparams, params) of a model, which a line on stderr names.

    model_size: "124M", "355M", "774M", "1558M" (OpenAI's, downloaded if need be), the name of a folder in models_dir,
    or None: see `choose_model`. models_dir: None is `models` beside this file.
    hparams: {n_vocab, n_ctx, n_embd, n_head, n_layer}, as in the file. params: {wte, wpe, blocks: [{attn: {c_attn: {w,
    b}, c_proj}, ln_1: {g, b}, ln_2, mlp: {c_fc, c_proj}}], ln_f}, float32, read-only, their shapes checked.
    Raises ValueError for a name that isn't there, OSError for files that are missing, damaged or can't be downloaded.
    """
    folder, note = choose_model(model_size, models_dir)
    try:
        encoder, hparams, params = load_model(folder)
    except DamagedFile as error:
        if folder.name not in SIZES:
            raise
        raise DamagedFile(f"{error}; with {folder} removed, the same command downloads it anew") from None
    shown = folder
    with contextlib.suppress(OSError, ValueError):  # the working directory may be gone; the folder may not be in it
        shown = folder.relative_to(Path.cwd())
    print(f"gpt2: model {folder.name} ({shown}){note}", file=sys.stderr)
    return encoder, hparams, params


def load_model(folder):
    """(encoder, hparams, params) of the model in a folder; OSError if a file is missing, damaged or doesn't fit."""
    if huggingface.is_layout_of(folder):
        return load_huggingface(folder)
    hparams = load_hparams(folder / "hparams.json")
    encoder = get_encoder(folder.name, folder.parent)
    n_ids = len(encoder.encoder)
    if n_ids > hparams["n_vocab"]:
        raise DamagedFile(f"{folder / 'encoder.json'} has {n_ids} ids, n_vocab in hparams.json is {hparams['n_vocab']}")
    return encoder, hparams, arrange(load_weights(folder), hparams, folder)


def load_huggingface(folder):
    """As load_model, from Hugging Face's layout."""
    hparams, encoder = huggingface.load_hparams(folder), huggingface_tokenizer.get_encoder(folder)
    n_ids, n_vocab = len(encoder.decoder), hparams["n_vocab"]
    if n_ids > n_vocab:
        raise DamagedFile(f"{folder}: the tokenizer has {n_ids} ids, vocab_size in config.json is {n_vocab}")
    names = (name for name, _ in tensors(hparams))
    weights = huggingface.load_weights(folder, names, hparams["tie_word_embeddings"])
    params = arrange(weights, hparams, folder, huggingface.their_name, "config.json")
    return encoder, hparams, huggingface.with_config(params, hparams)


def choose_model(model_size=None, models_dir=None):
    """(folder, note) of the model to run. The note, "" or not, is for the line that names the model.

    None is 124M, or the bundled model where 124M's host can't be reached; what is asked for is never replaced. Other
    arguments and what is raised: see `load_encoder_hparams_and_params`.
    """
    models_dir = MODELS_DIR if models_dir is None else Path(str(models_dir))
    if models_dir.is_file():
        raise ValueError(f"--models_dir {models_dir} is a file, not a folder")
    if model_size is not None and model_size not in SIZES:
        return find_model(str(model_size), models_dir), ""
    try:
        return download(model_size or SIZES[0], models_dir), ""
    except ConnectionError as error:
        if model_size is not None:
            raise ConnectionError(f"{error}; --model_size {BUNDLED.name} needs no network") from None
        note = f" in place of {SIZES[0]}: {error}; --model_size {SIZES[0]} insists on it"
        return find_model(BUNDLED.name, models_dir), note


def find_model(name, models_dir):
    """The folder of that name in models_dir, or the bundled one. Names are compared, not followed: ".." is none."""
    folders = [BUNDLED, *(sorted(models_dir.iterdir()) if models_dir.is_dir() else [])]
    models = {folder.name: folder for folder in folders if folder.is_dir() and not folder.name.startswith(".")}
    if name not in models:
        where = models_dir if models_dir.is_dir() else f"{models_dir}, which doesn't exist"
        others = ", ".join(model for model in models if model not in SIZES)
        raise ValueError(f"no model {name!r} in {where}; there are {', '.join(SIZES)} (OpenAI's), {others}")
    return models[name]


def load_hparams(path):
    """hparams.json as a dict; DamagedFile unless it holds the five numbers that make a GPT-2."""
    content = path.read_bytes()
    try:
        hparams = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise DamagedFile(f"{path} isn't JSON") from None
    if not isinstance(hparams, dict):
        raise DamagedFile(f"{path} doesn't hold a JSON object")
    for key in ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", *(["n_inner"] if "n_inner" in hparams else [])):
        if key not in hparams:
            raise DamagedFile(f"{path} lacks {key}")
        if type(hparams[key]) is not int or hparams[key] < 1:
            raise DamagedFile(f"{path}: {key} must be a positive whole number, not {hparams[key]!r:.40}")
    if hparams["n_embd"] % hparams["n_head"]:
        raise DamagedFile(f"{path}: n_head {hparams['n_head']} doesn't divide n_embd {hparams['n_embd']}")
    return hparams


def arrange(weights, hparams, folder, shown="model/{}".format, source="hparams.json"):
    """params from a dict of name -> array; DamagedFile unless there are just the tensors that hparams ask for.

    shown: a name -> what messages call the tensor. source: the file that hparams are from.
    """
    params = {}
    for name, shape in tensors(hparams):
        if name not in weights:
            raise DamagedFile(f"{folder}: the checkpoint lacks {shown(name)}, which {source} asks for")
        if weights[name].shape != shape:
            found, wanted = list(weights[name].shape), list(shape)
            raise DamagedFile(f"{folder}: {shown(name)} has the shape {found}, {source} asks for {wanted}")
        *path, last = name.split("/")
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[last] = weights[name]
    extra = weights.keys() - dict(tensors(hparams)).keys()
    if extra:
        raise DamagedFile(f"{folder}: the checkpoint has {shown(min(extra))}, for which {source} has no place")
    blocks = [params.pop(f"h{i}") for i in range(hparams["n_layer"])]
    return {**params, "blocks": blocks}


def tensors(hparams):
    """Yields (name, shape) of every tensor; one by one, so that an n_layer of a billion costs nothing."""
    n_embd = hparams["n_embd"]
    n_inner = hparams.get("n_inner", 4 * n_embd)
    linears = {
        "attn/c_attn": (n_embd, 3 * n_embd),
        "attn/c_proj": (n_embd, n_embd),
        "mlp/c_fc": (n_embd, n_inner),
        "mlp/c_proj": (n_inner, n_embd),
    }
    yield "wte", (hparams["n_vocab"], n_embd)
    yield "wpe", (hparams["n_ctx"], n_embd)
    yield "ln_f/g", (n_embd,)
    yield "ln_f/b", (n_embd,)
    for i in range(hparams["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            yield f"h{i}/{norm}/g", (n_embd,)
            yield f"h{i}/{norm}/b", (n_embd,)
        for linear, (n_in, n_out) in linears.items():
            yield f"h{i}/{linear}/w", (n_in, n_out)
            yield f"h{i}/{linear}/b", (n_out,)
