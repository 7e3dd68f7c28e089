"""Write a model in Hugging Face's layout, for transformers or a serving engine: python export.py --out DIR."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from model_files.huggingface import CONFIG, EPSILON, SIZES, WEIGHTS, import_safetensors, their_name
from utils import load_encoder_hparams_and_params


def export(out, model_size=None, models_dir=None):
    """Writes a model to the new or empty folder `out` in Hugging Face's layout, whole or not at all.

    Arguments and errors: see `load_encoder_hparams_and_params`; ValueError for an `out` that holds something.
    """
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is there already and isn't an empty folder")
    import_safetensors()  # before a download, if need be, not after it
    model = load_encoder_hparams_and_params(model_size, models_dir)
    part = out.with_name(f"part-{os.getpid()}-{out.name}")
    try:
        part.mkdir(parents=True)
        write(part, *model)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and error.strerror:
            raise OSError(f"can't write to {out}: {error.strerror}") from None
        raise


def write(folder, encoder, hparams, params):
    """Writes a model into a folder, for transformers and what reads the same files: float32, bit for bit. OSError.

    What `with_config` multiplied into the weights stays there. The token that ends a text becomes an added one.
    """
    safetensors = import_safetensors()
    from safetensors.numpy import save_file

    end = {"content": encoder.decoder[encoder.end_of_text], "id": encoder.end_of_text, "normalized": False}
    added, vocabulary = getattr(encoder, "added", [end]), getattr(encoder, "vocabulary", encoder.encoder)
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: hparams[ours] for ours, theirs in SIZES.items()},
        "n_inner": hparams.get("n_inner"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": hparams.get("layer_norm_epsilon", EPSILON),
        "bos_token_id": encoder.end_of_text,
        "eos_token_id": encoder.end_of_text,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": hparams["n_ctx"],
        **{f"{name}_token": end["content"] for name in ("bos", "eos", "unk")},
        "added_tokens_decoder": {
            token["id"]: flags
            | {key: token[key] for key in ("content", "normalized")}
            | {"special": not token["normalized"]}
            for token in added
        },
    }
    write_json(folder / CONFIG, config)
    write_json(folder / "vocab.json", vocabulary)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    new = {token["content"]: token["id"] for token in added if token["content"] not in vocabulary}
    if new:
        write_json(folder / "added_tokens.json", new)
    merges = sorted(encoder.ranks, key=encoder.ranks.get)
    (folder / "merges.txt").write_bytes("\n".join(["#version: 0.2", *merges, ""]).encode())
    tensors = {f"transformer.{name}": np.ascontiguousarray(array) for name, array in by_their_names(params)}
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers asks for that
    except safetensors.SafetensorError as error:
        raise OSError(f"{folder / WEIGHTS}: {error}") from None
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes for the owner's eyes alone


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def by_their_names(params):
    """Yields (their name, array) of every weight."""
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
