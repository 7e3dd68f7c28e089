"""Write a model in Hugging Face's layout, for transformers or a serving engine: python export.py --out DIR."""

import json
import secrets
import shutil
from pathlib import Path

import numpy as np

from encoder import read_object
from model_files import huggingface
from model_files.huggingface import CONFIG, GENERATION, WEIGHTS, import_safetensors, their_name
from utils import choose_model, load_and_name

PART = ".part-"  # what the folder's name begins with while it is being written
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
COPIED = (*TOKENIZER_FILES, "tokenizer_config.json", "chat_template.jinja", GENERATION)


def export(out, model_size=None, models_dir=None):
    """Writes a model to the new or empty folder `out` in Hugging Face's layout, whole or not at all.

    Arguments and errors: see `load_encoder_hparams_and_params`; ValueError for an `out` that holds something.
    """
    out = Path(out).resolve()
    check_empty(out)
    import_safetensors()  # before a download, if need be, not after it
    source, note = choose_model(model_size, models_dir)
    model = load_and_name(source, note)
    inside = out.exists()  # it may be a mounted volume, or all that the user may write to: it can't be replaced
    part = (out if inside else out.parent) / f"{PART}{secrets.token_hex(8)}"
    moved = []
    try:
        part.mkdir(parents=True)
        write(part, source, *model)
        check_empty(out)
        for path in sorted(part.iterdir(), key=lambda path: path.name == CONFIG) if inside else ():
            moved.append(path.rename(out / path.name))  # config.json last
        part.rmdir() if inside else part.rename(out)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        for path in moved:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.strerror:
            raise OSError(f"can't write to {out}: {error.strerror}") from None
        raise


def check_empty(out):
    """ValueError unless `out` can be filled. What a killed run left in it is no harm, nor what a new disk holds."""
    if out.exists() and (not out.is_dir() or any(not is_nothing(path.name) for path in out.iterdir())):
        raise ValueError(f"--out {out} is there already and isn't an empty folder")


def is_nothing(name):
    return name.startswith(PART) or name == "lost+found"


def write(folder, source, encoder, hparams, params):
    """Writes the model of the folder `source` into another, for transformers and what reads the same files. OSError.

    float32, bit for bit, but what `with_config` multiplied into the weights stays there. What came in Hugging Face's
    layout keeps its tokenizer's files and all other settings.
    """
    safetensors = import_safetensors()
    from safetensors.numpy import save_file  # an optional package

    if huggingface.is_layout_of(source):
        config = read_object(source / CONFIG)
        for path in (source / name for name in COPIED):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    else:
        config = new_config(encoder, hparams)
        write_tokenizer(folder, encoder, hparams)
    plain = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "torch_dtype": "float32"}
    write_json(folder / CONFIG, config | plain | kind)
    tensors = {f"transformer.{name}": np.ascontiguousarray(array) for name, array in by_their_names(params)}
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers asks for that
    except safetensors.SafetensorError as error:
        raise OSError(f"{folder / WEIGHTS}: {error}") from None
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes for the owner's eyes alone


def new_config(encoder, hparams):
    """config.json for a model in OpenAI's layout."""
    return {
        **{theirs: hparams[ours] for ours, theirs in huggingface.SIZES.items()},
        "n_inner": hparams.get("n_inner"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": huggingface.EPSILON,
        "bos_token_id": encoder.begin_of_text,
        "eos_token_id": encoder.end_of_text,
    }


def write_tokenizer(folder, encoder, hparams):
    """The tokenizer's files for a model in OpenAI's layout. The token that ends a text becomes an added one."""
    end = encoder.decoder[encoder.end_of_text]
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": hparams["n_ctx"],
        **{f"{name}_token": end for name in ("bos", "eos", "unk")},
        "added_tokens_decoder": {encoder.end_of_text: {"content": end, "special": True, **flags}},
    }
    write_json(folder / "vocab.json", encoder.encoder)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    merges = sorted(encoder.ranks, key=encoder.ranks.get)
    (folder / "merges.txt").write_bytes("\n".join(["#version: 0.2", *merges, ""]).encode())


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def by_their_names(params):
    """Yields (their name, array) of every weight, but what `with_config` added."""
    blocks = {f"h{i}": block for i, block in enumerate(params["blocks"])}
    nodes = [("", {key: value for key, value in params.items() if key != "blocks"} | blocks)]
    for path, node in nodes:
        for key, value in node.items():
            if isinstance(value, dict):
                nodes.append((f"{path}{key}/", value))
            elif key != "eps":
                yield their_name(path + key), value


def main(out: str, model_size: str = None, models_dir: str = None):
    """Write a model in Hugging Face's layout, for transformers or a serving engine."""
    export(out, model_size, models_dir)


if __name__ == "__main__":
    from command_line import run

    run(main)
