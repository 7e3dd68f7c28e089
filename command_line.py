"""What the command lines share: arguments, text to stdout as it is written, and failures as one line.

stdout carries the generated text and nothing else. Exit status: 2 for bad input, 1 for a failure, 130 after Ctrl-C.
"""

import codecs
import contextlib
import functools
import os
import sys

ARGUMENTS = {
    "prompt": "the text to continue; one that begins with a dash is written --prompt='-...'",
    "file": "a UTF-8 text file; - is stdin",
    "num_samples": "how many continuations of each prompt",
    "n_tokens_to_generate": "how many tokens to write at most (a token is about 4 letters of English)",
    "model_size": "124M, 355M, 774M or 1558M: OpenAI's GPT-2, downloaded once; or a folder in models_dir; "
    "124M if it's left out and on disk or to be had, else the bundled 'fairytale' (bench.py: fairytale)",
    "models_dir": "where the models are (models, beside this script, unless told)",
    "temperature": "below 1 safer, above 1 wilder; 0 is greedy, as is leaving out temperature, top_k and top_p",
    "top_k": "draw from the k most probable tokens",
    "top_p": "draw from the fewest most probable tokens that together have this probability",
    "seed": "the same number gives the same text",
    "prompt_cache": "a file that keeps what was computed for the prompt, for the next run that begins with it",
    "batch_size": "how many texts to write at once",
    "draft_model_size": "a smaller model with the same vocabulary that guesses; left out, the text itself does",
    "guesses": "how many tokens to guess at most",
    "out": "a folder that doesn't exist yet, or is empty",
    "rounds": "how often each thing is timed",
    "n_tokens": "how many tokens texts get that are timed with and without the cache, and in batches",
    "json": "a file for all numbers",
    "plot": "a file for the chart, .png or .svg (needs matplotlib)",
    "torch": "also time Hugging Face transformers on the same weights (needs torch and transformers)",
}


def read_text(path):
    """The text of a UTF-8 file, or of stdin for "-"; line ends become \n."""
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} isn't UTF-8 text: byte {error.start} is wrong") from None


def progress(items, total, unit):
    """The iterator itself; with a bar on stderr for a person who sees stderr while the results go elsewhere."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit)


def write_text(tokens, encoder, n_tokens):
    """Writes the text of an iterator of token ids to stdout, each character as soon as its last byte is there.

    -> the number of tokens that there were.
    """
    on_screen = sys.stdout.isatty()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    n = 0
    for n, token in enumerate(progress(tokens, n_tokens, "token"), 1):  # noqa: B007
        sys.stdout.write(decoder.decode(encoder.decode_bytes([token])))
        if on_screen:
            sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True))
    if on_screen and n_tokens:
        sys.stdout.write("\n")
    return n


def parser(kind, name):
    """A function from an argument's text to its value, ValueError if it isn't one."""

    def parse(text):
        if kind is str:
            return text
        if kind is bool:
            return text != "False"  # fire turns --name into "True" and --noname into "False"
        try:
            return kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"--{name} must be {wanted}, not {text!r}") from None

    return parse


def parse(main, arguments):
    """main with its arguments, not yet called: all are read before any work begins.

    Each is taken as its annotation says, never guessed: the prompt 007 stays these three characters.
    """
    kinds = main.__annotations__
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=False):
        name = word.removeprefix("--").replace("-", "_")
        if word.startswith("--") and kinds.get(name) in (str, int, float) and after.startswith("--"):
            raise ValueError(f"--{name} needs a value; one that begins with dashes is written --{name}=VALUE")
    return parse_plain(main, arguments) or parse_with_fire(main, arguments)


def parse_plain(main, arguments):
    """parse, for arguments without a mistake or a rarer form (`--name value` and `--name=value`), else None.

    Importing fire takes longer than reading and running the bundled model.
    """
    kinds, given, words = dict(main.__annotations__), {}, iter(arguments)
    required = list(kinds)[: len(kinds) - len(main.__defaults__ or ())]
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            value = value if equals else next(words, "-")
        else:
            name, value = next((name for name in required if name not in given), None), word
        if kinds.get(name) in (None, bool) or name in given or value.startswith("-"):
            return None
        try:
            given[name] = parser(kinds[name], name)(value)
        except ValueError:
            return None
    return functools.partial(main, **given) if given.keys() >= set(required) else None


def parse_with_fire(main, arguments):
    """parse, for every other command line: fire knows the rarer forms, writes the help, and says what is wrong."""
    import inspect
    import io

    import fire

    @functools.wraps(main)
    def collect(*args, **kwargs):
        calls.append(functools.partial(main, *args, **kwargs))

    calls, screen = [], io.StringIO()
    parameters = inspect.signature(main).parameters.values()
    kinds = {p.name: p.annotation for p in parameters}
    collect.__signature__ = inspect.Signature(  # a second word without quotes shall not be taken for the next option
        [p if p.default is p.empty else p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    )
    collect.__doc__ += "\n\nArgs:\n" + "".join(f"    {name}: {ARGUMENTS[name]}\n" for name in kinds)
    fire.decorators.SetParseFns(**{name: parser(kind, name) for name, kind in kinds.items()})(collect)
    name = os.path.basename(sys.argv[0])
    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]
    try:
        with contextlib.redirect_stderr(screen):
            # fire ends the arguments of a call at a lone "-"; here that may be a prompt, so another sign is named
            fire.Fire(collect, [*arguments, "--", "--separator=\0"], name=name)
    except fire.core.FireExit as stop:
        if stop.code == 0:  # --help
            help_text = screen.getvalue().partition("\n\n")[2].partition("\n\nGROUPS")[0]
            print(help_text.replace("GROUP | ", ""))
            raise
        reason = screen.getvalue().splitlines()[0].removeprefix("ERROR: ")
        if reason.startswith("Could not consume arg: "):
            word = reason.partition(": ")[2]
            reason = f"{word!r} isn't an argument; a text of several words needs quotes"
        raise ValueError(f"{reason} (see python {name} --help)") from None
    return calls[0]


def run(main):
    """Calls main with the arguments of the command line and ends the process with the right status."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed, as by `>&-`
            setattr(sys, stream, open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks becomes "?"
    try:
        parse(main, sys.argv[1:])()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted (`| head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.exit(130)
    except (ValueError, OSError, MemoryError) as error:
        sys.stdout.flush()
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename}: {error.strerror}"  # without "[Errno 2]"
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
