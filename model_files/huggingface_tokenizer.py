"""The tokenizer of Hugging Face's layout: `tokenizer.json`, or `vocab.json` and `merges.txt`.

The latter are OpenAI's `encoder.json` and `vocab.bpe` under other names; `added_tokens.json` goes with them.
`tokenizer_config.json` names the special tokens. Format: transformers' GPT2Tokenizer.
"""

import re

from encoder import CODE_POINT, END_OF_TEXT, Encoder, check_ids, rank, read_object, read_ranks
from errors import DamagedFile

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class EncoderWithAddedTokens(Encoder):
    """An Encoder that first cuts a text at its added tokens, as Hugging Face's tokenizers do: "<|endoftext|>" is one.

    added: [{content, id, normalized}]. Those that aren't "normalized" are found first, the longest where several fit.
    """

    def __init__(self, encoder, ranks, end_of_text, added):
        super().__init__(encoder | {token["content"]: token["id"] for token in added}, ranks, end_of_text)
        new = [token for token in added if token["content"] not in encoder]
        self.decoder |= {token["id"]: spell(token["content"]) for token in new}
        self.vocabulary, self.added, self._patterns = encoder, added, []
        for normalized in (False, True):
            group = {token["content"] for token in added if bool(token["normalized"]) is normalized} - {""}
            longest_first = "|".join(map(re.escape, sorted(group, key=len, reverse=True)))
            if group:
                self._patterns.append(re.compile(f"({longest_first})"))

    def encode(self, text, n_done=0):
        if n_done == len(self._patterns):
            return super().encode(text)
        ids = []
        for i, part in enumerate(self._patterns[n_done].split(text)):  # text, token, text, ... token, text
            ids += [self.encoder[part]] if i % 2 else self.encode(part, n_done + 1)
        return ids


def spell(text):
    """The piece that stands for a text."""
    return text.encode("utf-8", "replace").decode("latin-1").translate(CODE_POINT)


def get_encoder(folder):
    """The Encoder of a folder. OSError, DamagedFile for files that are missing, damaged or no GPT-2 tokenizer's."""
    settings = folder / "tokenizer_config.json"
    config = read_object(settings) if settings.is_file() else {}
    for key in ("add_prefix_space", "add_bos_token", "add_eos_token"):
        if config.get(key):
            raise DamagedFile(f"{settings}: {key} isn't supported")
    path = folder / "tokenizer.json"
    try:
        special = [name_of(config.get(key)) for key in SPECIAL_TOKENS]
        if path.is_file():
            ids, ranks, added = read_tokenizer(path)
        else:
            path = folder / "vocab.json"
            if not (path.is_file() and (folder / "merges.txt").is_file()):
                raise FileNotFoundError(
                    f"{folder} has neither tokenizer.json nor vocab.json and merges.txt: save the tokenizer there, too"
                )
            ids, ranks, added = read_vocabulary(folder, config, special)
        end_of_text = name_of(config.get("eos_token")) or END_OF_TEXT
        for token in added:
            if any(token.get(key) for key in ("lstrip", "rstrip", "single_word")):
                raise ValueError(f"the added token {token['content']!r:.40} is lstrip, rstrip or single_word")
        check_ids(path, ids | {token["content"]: token["id"] for token in added}, end_of_text)
        return EncoderWithAddedTokens(ids, ranks, end_of_text, added)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DamagedFile(f"{path}: not a tokenizer like GPT-2's, or not supported: {str(why)[:200]}") from None


def name_of(token):
    """A special token's text: tokenizer_config.json has it alone or with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def read_vocabulary(folder, config, special):
    """(ids, ranks, added tokens) of vocab.json, merges.txt, added_tokens.json and tokenizer_config.json."""
    ids, extra = read_object(folder / "vocab.json"), {}
    if (folder / "added_tokens.json").is_file():
        extra = read_object(folder / "added_tokens.json")
    special = {
        *special,
        *map(name_of, [*listed(config, "additional_special_tokens"), *listed(config, "extra_special_tokens")]),
    }
    special |= {END_OF_TEXT}
    added = {
        content: {"content": content, "id": i, "normalized": content not in special} for content, i in extra.items()
    }
    for content in (special & ids.keys()) - added.keys():
        added[content] = {"content": content, "id": ids[content], "normalized": False}
    for i, token in config.get("added_tokens_decoder", {}).items():
        added[token["content"]] = {"normalized": True} | token | {"id": int(i)}
    ranks = read_ranks(folder / "merges.txt", ids, added)
    return ids, ranks, list(added.values())


def listed(config, key):
    value = config.get(key) or []
    return list(value.values() if isinstance(value, dict) else value)


def read_tokenizer(path):
    """(ids, ranks, added tokens) of tokenizer.json; ValueError for what isn't as in GPT-2."""
    tokenizer = read_object(path)
    model, splitter, after = tokenizer["model"], tokenizer["pre_tokenizer"] or {}, tokenizer.get("post_processor") or {}
    wrong = {
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True),
        "add_prefix_space": splitter.get("add_prefix_space"),
        "post_processor": after.get("special_tokens")
        or after.get("type") not in (None, "ByteLevel", "TemplateProcessing"),
        "model": model.get("type", "BPE") != "BPE",  # old files leave it out
    }
    wrong |= {key: model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    wrong |= {key: model.get(key) for key in ("byte_fallback", "ignore_merges")}
    for key, value in wrong.items():
        if value:
            raise ValueError(f"its {key} differs")
    added = [{"normalized": True} | token for token in tokenizer["added_tokens"]]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    ids = dict(model["vocab"])
    return ids, rank(path, merges, ids, [token["content"] for token in added]), added
