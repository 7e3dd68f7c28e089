"""What export.py writes is the model, whole or not at all, wherever it is to go."""

import json

import numpy as np
import pytest
import safetensors.numpy
from folders import GOLDEN, MODELS, load, logits
from tiny import arrays

from export import export
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
