"""What export.py writes is the model, whole or not at all, wherever it is to go."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from folders import CASES, GOLDEN, MODELS, difference, load, logits, read, stored, write_case
from tiny import arrays

from export import by_their_names, export
from utils import load_encoder_hparams_and_params


def test_what_is_exported_loads_bit_for_bit(tmp_path):
    export(tmp_path / "deeper" / "tale", "fairytale")
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
    encoder2, hparams2, params2 = load(tmp_path / "deeper" / "tale")
    assert [a.tobytes() for a in arrays(params2)] == [a.tobytes() for a in arrays(params)]
    assert hparams2.items() >= hparams.items()
    text = "Once upon a time, 中文 👑 \n\n there's 1234 <|endoftex|>"
    assert encoder2.encode(text) == encoder.encode(text)
    assert encoder2.end_of_text == encoder.end_of_text and encoder2.decoder == encoder.decoder
    assert {file.name for file in (tmp_path / "deeper" / "tale").iterdir()} == {
        *("config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json")
    }
    assert [path.name for path in (tmp_path / "deeper").iterdir()] == ["tale"]
    assert len({file.stat().st_mode for file in (tmp_path / "deeper" / "tale").iterdir()}) == 1


@pytest.mark.parametrize("name", MODELS)
def test_what_came_from_transformers_is_exported_with_its_added_tokens_and_settings(name, tmp_path):
    export(tmp_path / "out", name, GOLDEN)
    encoder, hparams, params = load(tmp_path / "out")
    golden = json.loads((GOLDEN / "ids.json").read_text())
    assert [encoder.encode(text) for text in golden["texts"]] == golden[name]
    with np.load(GOLDEN / "logits.npz") as expected:
        assert np.abs(logits(params, hparams["n_head"]) - expected[name]).max() < 1e-4


SETTINGS = ["config.json goes before the tokenizer", "several ends in generation_config.json", "a pad token with a row"]
SETTINGS += ["the end in special_tokens_map.json with its flags", "no beginning", "tokenizer.json as it stands"]


@pytest.mark.parametrize("name", [*SETTINGS, "sizes under other names", "heads, buffers and a block too many"])
def test_nothing_is_lost_on_the_way_out(name, tmp_path):
    """That transformers' generate() gives the same ids before and after: compare_huggingface_folders.py."""
    source, out = write_case(name, tmp_path / "models" / "case"), tmp_path / "out"
    export(out, "case", tmp_path / "models")
    answers = json.loads((GOLDEN / "answers.json").read_text("utf-8"))
    assert difference(answers[name], read(out, CASES[name].texts)) == ""
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert after.items() >= before.items()


def test_an_empty_folder_is_filled_in_its_place(tmp_path):
    """It may be a mounted volume, or in a folder where one may write nothing else."""
    out = tmp_path / "out"
    (out / "lost+found").mkdir(parents=True)
    (out / ".part-0123").mkdir()  # what a run left that was killed
    before = out.stat().st_ino
    export(out, "fairytale")
    assert out.stat().st_ino == before and list(tmp_path.iterdir()) == [out]
    assert {path.name for path in out.glob("*.json")} == {"config.json", "vocab.json", "tokenizer_config.json"}
    assert (out / "model.safetensors").is_file() and list(out.glob(".part-*")) == [out / ".part-0123"]


def test_a_name_while_it_is_written_is_never_used_twice(tmp_path, monkeypatch):
    """In containers every process may have the number 1."""
    seen = []
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("export.write", lambda part, *model: seen.append(part))
    for name in "ab":
        export(tmp_path / name, "fairytale")
    assert seen[0] != seen[1] and {part.parent for part in seen} == {tmp_path}


@pytest.mark.parametrize("name", ["vocab.json", "model.safetensors", "config.json"])
def test_a_folder_that_cannot_be_filled_is_left_as_empty_as_it_was(name, tmp_path, monkeypatch):
    rename = Path.rename

    def full(path, target):
        if path.name == name:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match=r"^can't write to .*out: No space left on device$"):
        export(tmp_path / "out", "fairytale")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_what_another_run_wrote_meanwhile_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("export.write", lambda part, *model: (tmp_path / "out" / "config.json").write_text("theirs"))
    with pytest.raises(ValueError, match="isn't an empty folder"):
        export(tmp_path / "out", "fairytale")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_the_weights_have_their_names_in_transformers():
    names = dict(by_their_names(load(GOLDEN / "settings")[2]))
    assert names.keys() == stored(GOLDEN / "settings").keys() and names["h.2.mlp.c_fc.weight"].shape == (12, 31)


def test_an_empty_folder_is_filled_and_one_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", "fairytale")
    (tmp_path / "file").touch()
    for taken in ("out", "file"):
        with pytest.raises(ValueError, match=f"{taken} is there already and isn't an empty folder"):
            export(tmp_path / taken, "fairytale")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise safetensors.SafetensorError("no space")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="model.safetensors: no space"):
        export(tmp_path / "out", "fairytale")
    assert not list(tmp_path.iterdir())
