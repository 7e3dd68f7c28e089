"""The tokenizer of Hugging Face's layout: `tokenizer.json`, or `vocab.json` and `merges.txt`.

The latter are OpenAI's `encoder.json` and `vocab.bpe` under other names. Tokens that were added later, and those with a
name of their own (bos_token, pad_token ...), stand in `tokenizer.json`, `added_tokens.json`, `special_tokens_map.json`
and `tokenizer_config.json`. Ids are those of transformers 5.24's GPT2Tokenizer, or of its TokenizersBackend where the
folder asks for that: an added token's id is the next free one, whatever number stands beside it in the files. (Before
version 5, slow tokenizers took that number, and decoded added tokens as text; the latter is kept.)
"""

import re
import sys

import regex

from encoder import BYTE_PIECES, END_OF_TEXT, SPECIAL, Encoder, merge, rank, read_object, read_utf8, spell, unmade
from errors import DamagedFile
from model_files.huggingface import load_hparams

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # these take tokenizer.json as it stands
FLAGS = {"special": False, "normalized": None, "lstrip": False, "rstrip": False, "single_word": False}
LETTERS = frozenset(BYTE_PIECES)
SPACE, WORD_LETTER = regex.compile(r"\s"), regex.compile(r"\w")  # as Rust's, which differ from Python's own


class EncoderWithAddedTokens(Encoder):
    """An Encoder that first cuts a text at its added tokens, as Hugging Face's tokenizers do: "<|endoftext|>" is one.

    added: a dict from each added token's text to its id and FLAGS. affixes: the ids (before, after) every text.
    prefix_space: whether a part of a text that doesn't begin with a space gets one. n_vocab: how many ids the model
    has; a text with a token beyond them is a ValueError.
    """

    def __init__(self, ids, ranks, added, affixes, prefix_space, n_vocab, **ends):
        super().__init__(ids | {text: token["id"] for text, token in added.items()}, ranks, **ends)
        self.decoder = {i: piece if LETTERS.issuperset(piece) else spell(piece) for piece, i in ids.items()}
        self.decoder |= {token["id"]: spell(text) for text, token in added.items() if text not in ids}
        self.vocabulary, self.added, self.affixes, self.prefix_space = ids, added, affixes, prefix_space
        self.n_vocab, self._patterns = n_vocab, []
        for normalized in (False, True):  # the latter are looked for in what is left
            texts = [text for text, token in added.items() if token["normalized"] is normalized]
            if texts:
                longest_first = map(re.escape, sorted(texts, key=len, reverse=True))
                self._patterns.append(re.compile("|".join(longest_first)))

    def _word_ids(self, word):
        known = [letter for letter in spell(word) if letter in self.vocabulary]  # a byte without a piece is left out
        return tuple([self.vocabulary[piece] for piece in merge(known, self.ranks)])

    def encode(self, text):
        parts = [(text, None)]
        for pattern in self._patterns:
            parts = [new for part, i in parts for new in (cut(part, pattern, self.added) if i is None else [(part, i)])]
        before, after = self.affixes
        ids = [*before]
        for part, i in parts:
            space = " " if self.prefix_space and part[:1] not in ("", " ") else ""
            ids += super().encode(space + part) if i is None else [i]
        ids += after
        if ids and max(ids) >= self.n_vocab:
            raise ValueError(f"the model has {self.n_vocab} tokens, and {self.decode([max(ids)])!r} isn't one of them")
        return ids


def cut(text, pattern, added):
    """Yields (part, None) for each part of a text between added tokens, and (part, id) for each of these.

    White space beside a token belongs to it on the sides where it is lstrip or rstrip; inside of a longer word one that
    is single_word isn't found.
    """
    done = 0
    for match in pattern.finditer(text):
        token, (start, end) = added[match[0]], match.span()
        if token["single_word"] and (start and WORD_LETTER.match(text, start - 1) or WORD_LETTER.match(text, end)):
            continue
        while token["lstrip"] and start > done and SPACE.match(text, start - 1):
            start -= 1
        while token["rstrip"] and SPACE.match(text, end):
            end += 1
        if done < start:
            yield text[done:start], None
        yield text[start:end], token["id"]
        done = end
    yield text[done:], None


def get_encoder(folder):
    """The Encoder of a folder, for the n_vocab of its config.json and the ids that huggingface.load_hparams finds.

    OSError, DamagedFile for files that are missing, damaged or no GPT-2 tokenizer's.
    """
    hparams, config, path = load_hparams(folder), read_settings(folder), folder / "tokenizer.json"
    tokenizer = read_object(path) if path.is_file() else None
    is_gpt2 = tokenizer is None or config.get("tokenizer_class") in GPT2_CLASSES
    try:
        if tokenizer is None:
            path = folder / "vocab.json"
            ids, ranks = read_vocabulary(folder)
        else:
            ids, ranks = read_tokenizer(path, tokenizer, is_gpt2)
        added, begin, end = added_tokens(folder, config, tokenizer, is_gpt2, ids)
        affixes = affixes_by_flags(config, begin, end) if tokenizer is None else affixes_of(tokenizer)
        prefix_space = (config if is_gpt2 else tokenizer["pre_tokenizer"]).get("add_prefix_space")
        if config.get("split_special_tokens"):  # they aren't looked for in a text
            added = {text: t | {"normalized": None} if t["special"] else t for text, t in added.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DamagedFile(f"{path}: not a tokenizer like GPT-2's, or not supported: {str(why)[:200]}") from None
    report_lost_merges(path, ids, ranks, added)
    n_vocab = hparams["n_vocab"]
    ends = known(hparams["eos_token_ids"], n_vocab) or known([end], n_vocab)
    begin, *_ = *known([hparams["bos_token_id"], begin], n_vocab), None
    ends = {"end_of_text": ends[0] if len(ends) == 1 else ends, "begin_of_text": begin}
    return EncoderWithAddedTokens(ids, ranks, added, affixes, prefix_space, n_vocab, **ends)


def known(ids, n_vocab):
    """A tuple of those ids that a model has: files name others, too, such as 50256 because it is the default."""
    return tuple(i for i in ids if i is not None and 0 <= i < n_vocab)


def read_settings(folder):
    """tokenizer_config.json, and special_tokens_map.json where the former doesn't list the added tokens."""
    path = folder / "tokenizer_config.json"
    config = read_if_there(path)
    if config.get("tokenizer_class") not in GPT2_CLASSES + PLAIN_CLASSES:
        raise DamagedFile(f"{path}: tokenizer_class {config['tokenizer_class']!r:.40} isn't supported")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    old = {} if "added_tokens_decoder" in config else read_if_there(folder / "special_tokens_map.json")
    if isinstance(extra, list):
        extra = [*extra, *(old.get("extra_special_tokens") or [])] or old.get("additional_special_tokens") or []
    return config | old | {"extra_special_tokens": extra}


def read_if_there(path):
    return read_object(path) if path.is_file() else {}


def as_token(token, special=False):
    """The dict of an added token with all FLAGS; the files have the text alone, or some of them."""
    token = FLAGS | {"special": special} | (token if isinstance(token, dict) else {"content": token})
    if not isinstance(token["content"], str):
        raise TypeError(f"an added token is {token['content']!r:.40}")
    return token | ({"normalized": not token["special"]} if token["normalized"] is None else {})


def special_tokens(config, is_gpt2):
    """(name -> token, the tokens without a name) of those that are special."""
    defaults = dict.fromkeys(NAMED[:3], END_OF_TEXT) if is_gpt2 else {}
    named = {name: (defaults | config).get(name) for name in NAMED}
    named |= {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    extra = config["extra_special_tokens"]
    if isinstance(extra, dict):
        named, extra = named | extra, []
    named = {name: as_token(token, special=True) for name, token in named.items() if token is not None}
    return named, [as_token(token, special=True) for token in extra]


def added_tokens(folder, config, tokenizer, is_gpt2, ids):
    """(text -> token with its id of all that were added, the id of bos_token, that of eos_token, or None).

    ids: the vocabulary's. TokenizersBackend gives ids to tokenizer.json's tokens first, whatever else is listed.
    """
    first = [] if is_gpt2 else [as_token(token) for token in tokenizer["added_tokens"]]
    numbers, by_id = with_ids(first, ids, {}, {})
    listed, (named, others) = listed_tokens(folder, config, tokenizer), special_tokens(config, is_gpt2)
    texts = {token["content"] for token in (*by_id.values(), *listed)}
    new = []
    for token in (*named.values(), *others):
        if token["content"] not in texts and token not in new:  # the last of those that differ in their flags counts
            new.append(token)
    numbers, by_id = with_ids([*listed, *new], ids, numbers, by_id)
    begin, end = (numbers.get(named[name]["content"]) if name in named else None for name in NAMED[:2])
    return {token["content"]: token | {"id": i} for i, token in by_id.items()}, begin, end


def listed_tokens(folder, config, tokenizer):
    """The added tokens that tokenizer_config.json lists, or else older files, in the order of the numbers there."""
    if "added_tokens_decoder" in config:
        by_number = {int(number): as_token(token) for number, token in config["added_tokens_decoder"].items()}
    else:
        special = [token for name, token in config.items() if name in NAMED]
        special += config["extra_special_tokens"] if isinstance(config["extra_special_tokens"], list) else []
        names = {token if isinstance(token, str) else token["content"] for token in special if is_plain(token)}
        old = read_if_there(folder / "added_tokens.json")
        by_number = {number: as_token(text, special=text in names) for text, number in old.items()}
        by_number |= {token["id"]: as_token(token) for token in (tokenizer or {"added_tokens": ()})["added_tokens"]}
    return [token for _, token in sorted(by_number.items(), key=lambda item: item[0])]


def is_plain(token):
    """Whether transformers sees which text this is, when it looks for those of added_tokens.json that are special."""
    return token is not None and "__type" not in token


def with_ids(tokens, ids, numbers, by_id):
    """(text -> id, id -> token) of the tokens and of those that came before. ids: the vocabulary's.

    A new token takes the next id after the vocabulary's number of pieces and the tokens that came before, even where a
    vocabulary with holes has a piece: a token that had the id isn't found in a text any more.
    """
    numbers, by_id = dict(numbers), dict(by_id)
    following = max(len(ids), max(by_id, default=0) + 1)
    for token in tokens:
        text = token["content"]
        if text:
            i = numbers.get(text, ids.get(text, following))
            following += text not in numbers and text not in ids
            numbers[text], by_id[i] = i, token
    return numbers, by_id


def read_vocabulary(folder):
    """(ids, ranks) of vocab.json and merges.txt."""
    path, merges = folder / "vocab.json", folder / "merges.txt"
    if not (path.is_file() and merges.is_file()):
        raise FileNotFoundError(
            f"{folder} has neither tokenizer.json nor vocab.json and merges.txt: save the tokenizer there, too"
        )
    ids = check_ids(read_object(path))
    lines = read_utf8(merges).rstrip("\n").split("\n")
    return ids, rank(merges, [line for line in lines if not line.startswith("#version")], ids)


def read_tokenizer(path, tokenizer, is_gpt2):
    """(ids, ranks) of tokenizer.json; ValueError for what isn't as in GPT-2."""
    model, splitter = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    wrong = {
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True),
        "model": model.get("type", "BPE") != "BPE",  # old files leave it out
    }
    wrong |= {key: model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    wrong |= {key: model.get(key) for key in ("byte_fallback", "ignore_merges")}
    for key, value in wrong.items():
        if value:
            raise ValueError(f"its {key} differs")
    ids = check_ids(dict(model["vocab"]))
    if model.get("unk_token") and not is_gpt2 and not ids.keys() >= LETTERS:
        raise ValueError("it lacks bytes, for which there is an unk_token")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return ids, rank(path, merges, ids)


def check_ids(ids):
    """The dict itself; ValueError unless it maps pieces to ids, each once. There may be holes between them."""
    numbers = set(ids.values())
    if not set(map(type, numbers)) <= {int} or min(numbers, default=0) < 0 or len(numbers) < len(ids):
        raise ValueError(f"the ids of its {len(ids)} pieces aren't whole numbers, each once")
    return ids


def affixes_of(tokenizer):
    """The ids (before, after) every text that the post-processor of tokenizer.json adds."""
    whole = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    parts = whole["processors"] if whole["type"] == "Sequence" else [whole]
    templates = [part for part in parts if part["type"] != "ByteLevel"]
    if not templates:
        return [], []
    if len(templates) > 1 or templates[0]["type"] != "TemplateProcessing" or "single" not in templates[0]:
        raise ValueError("its post_processor differs")
    ids = {name: token["ids"] for name, token in templates[0]["special_tokens"].items()}
    items = [ids[item["SpecialToken"]["id"]] if "SpecialToken" in item else None for item in templates[0]["single"]]
    place = items.index(None)  # the text's
    return sum(items[:place], []), sum(items[place + 1 :], [])


def affixes_by_flags(config, begin, end):
    """The same for vocab.json, where tokenizer_config.json says so."""
    flags = (("add_bos_token", begin), ("add_eos_token", end))
    return [[i] if config.get(flag) and i is not None else [] for flag, i in flags]


def report_lost_merges(path, ids, ranks, added):
    """A line on stderr if there are pieces that no text is cut into: of a merges file that was cut short, perhaps."""
    lost = [piece for piece in unmade(ids, ranks) if piece not in added and not SPECIAL.fullmatch(piece)]
    if lost:
        print(
            f"gpt2: {path}: no merge makes {lost[0][:80]!r} (of {len(lost)}); were merges cut short?", file=sys.stderr
        )
