"""From a model's name to (encoder, hparams, params): which folder, is all there, does all fit together."""

import re
import sys
from pathlib import Path

from encoder import get_encoder, read_object
from errors import DamagedFile
from model_files import huggingface, huggingface_tokenizer
from model_files.checkpoint import load_weights
from model_files.download import SIZES, download

MODELS_DIR = Path(__file__).resolve().parent / "models"
BUNDLED = MODELS_DIR / "fairytale"
HPARAMS = ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer")


def load_encoder_hparams_and_params(model_size=None, models_dir=None):
    """(encoder, hparams, params) of a model, which a line on stderr names.

    model_size: "124M", "355M", "774M", "1558M" (OpenAI's, downloaded if need be), the name of a folder in models_dir,
    or None: see `choose_model`. models_dir: None is `models` beside this file.
    hparams: {n_vocab, n_ctx, n_embd, n_head, n_layer}, as in the file. params: {wte, wpe, blocks: [{attn: {c_attn: {w,
    b}, c_proj}, ln_1: {g, b}, ln_2, mlp: {c_fc, c_proj}}], ln_f}, float32, read-only, their shapes checked.
    Raises ValueError for a name that isn't there, OSError for files that are missing, damaged or can't be downloaded.
    """
    return load_and_name(*choose_model(model_size, models_dir))


def load_and_name(folder, note=""):
    """load_encoder_hparams_and_params of the model in a folder. note: what else the line on stderr says."""
    try:
        encoder, hparams, params = load_model(folder)
    except DamagedFile as error:
        if folder.name not in SIZES:
            raise
        raise DamagedFile(f"{error}; with {folder} removed, the same command downloads it anew") from None
    print(f"gpt2: model {folder.name} ({shortest(folder)}){note}", file=sys.stderr)
    return encoder, hparams, params


def shortest(folder):
    """The folder as seen from the working directory, or in full if it is elsewhere or that directory is gone."""
    try:
        return folder.relative_to(Path.cwd())
    except (ValueError, FileNotFoundError):
        return folder


def load_model(folder):
    """(encoder, hparams, params) of the model in a folder; OSError if a file is missing, damaged or doesn't fit."""
    if huggingface.is_layout_of(folder):
        return load_huggingface(folder)
    hparams = load_hparams(folder / "hparams.json")
    encoder = get_encoder(folder.name, folder.parent)
    n_ids, n_vocab = len(encoder.encoder), hparams["n_vocab"]
    if n_ids > n_vocab:
        raise DamagedFile(f"{folder / 'encoder.json'} has {n_ids} ids, n_vocab in hparams.json is {n_vocab}")
    params = arrange(load_weights(folder), hparams, folder)
    encoder.decoder |= dict.fromkeys(range(n_ids, n_vocab), "")  # rows of wte that only pad it stand for nothing
    return encoder, hparams, params


def load_huggingface(folder):
    """As load_model, from Hugging Face's layout. A line on stderr names the weights that aren't used."""
    hparams = huggingface.load_hparams(folder)
    check_sizes(folder / huggingface.CONFIG, hparams, huggingface.SIZES)
    encoder = huggingface_tokenizer.get_encoder(folder)
    names = (name for name, _ in tensors(hparams))
    weights, unused = huggingface.load_weights(folder, names, hparams["tie_word_embeddings"])
    params = arrange(weights, hparams, folder, huggingface.their_name, huggingface.CONFIG)
    encoder.decoder |= {i: "" for i in range(hparams["n_vocab"]) if i not in encoder.decoder}  # as above, and holes
    if unused:
        kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in unused})  # h.*.attn.bias: one of each block
        print(f"gpt2: {folder.name} also holds {', '.join(kinds):.200}: not used", file=sys.stderr)
    return encoder, hparams, huggingface.with_config(params, hparams)


def choose_model(model_size=None, models_dir=None):
    """(folder, note) of the model to run. The note, "" or not, is for the line that names the model.

    None is 124M, or the bundled model where 124M can't be had from its host; what is asked for is never replaced.
    Other arguments and what is raised: see `load_encoder_hparams_and_params`.
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
    hparams = read_object(path)
    for key in HPARAMS:
        if key not in hparams:
            raise DamagedFile(f"{path} lacks {key}")
    check_sizes(path, hparams)
    return hparams


def check_sizes(path, hparams, their_names=None):
    """DamagedFile unless the sizes of a GPT-2 are possible. their_names: what the file calls them, if not as here."""
    for key in (*HPARAMS, *(["n_inner"] if "n_inner" in hparams else [])):
        if type(hparams[key]) is not int or hparams[key] < 1:
            name = (their_names or {}).get(key, key)
            raise DamagedFile(f"{path}: {name} must be a positive whole number, not {hparams[key]!r:.40}")
    if hparams["n_embd"] % hparams["n_head"]:
        raise DamagedFile(f"{path}: n_head {hparams['n_head']} doesn't divide n_embd {hparams['n_embd']}")


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
