"""What the command lines share: arguments, text to stdout as it is written, and failures as one line.

stdout carries the generated text and nothing else. Exit status: 2 for bad input, 1 for a failure, 130 after Ctrl-C,
143 after SIGTERM.
"""

import codecs
import contextlib
import functools
import os
import re
import select
import signal
import sys
import time
import warnings
import weakref

EVERY = 0.02  # a flush for every token of the bundled model would cost 1 to 2 % of its time

FLAG = re.compile("--|-[a-zA-Z]")  # how a word begins that names an argument; -5 and - are texts

ARGUMENTS = {
    "prompt": "the text to continue; - reads it from stdin, less a line end at its end; "
    "one that begins with a dash is written --prompt='-...'",
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


def read_input(path):
    """The text of a UTF-8 file, or of stdin for "-"; line ends become \n. ValueError if it isn't UTF-8, or OSError."""
    if path == "-" and sys.stdin is None:
        raise OSError("stdin is closed")
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        name = "stdin" if path == "-" else path
        raise ValueError(f"{name} isn't UTF-8 text: byte {error.start} is wrong") from None


def with_bar(items, total, unit):
    """The iterator itself; with a bar on stderr for a person who sees stderr while the results go elsewhere."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit)


def write_text(tokens, encoder, n_tokens):
    """Writes the text of an iterator of token ids to stdout, each character as soon as its last byte is there.

    A pipe or file gets it with the first token that comes EVERY seconds after it last got some. -> how many there were.
    """
    on_screen = sys.stdout.isatty()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    n, flushed = 0, -EVERY
    for n, token in enumerate(with_bar(tokens, n_tokens, "token"), 1):  # noqa: B007
        sys.stdout.write(decoder.decode(encoder.decode_bytes([token])))
        if on_screen or time.monotonic() - flushed > EVERY:
            sys.stdout.flush()
            flushed = time.monotonic()
    sys.stdout.write(decoder.decode(b"", final=True))
    if on_screen and n_tokens:
        sys.stdout.write("\n")
    return n


def parse(main, arguments):
    """main with its arguments, not yet called, or what prints the help: all are read before any work begins.

    Each is taken as its annotation says, never guessed: the prompt 007 stays these three characters.
    """
    texts = split(main, arguments)
    if texts is None:
        return explain(main, arguments)
    return functools.partial(main, **{name: to_value(text, name, main) for name, text in texts.items()})


def split(main, arguments):
    """{name: text} of a command line that is well-formed, which is what fire accepts; None of any other.

    ValueError for a name without a value. Importing fire takes longer than reading and running the bundled model.
    """
    kinds, texts, words, rest = main.__annotations__, {}, [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not FLAG.match(word):
            words.append(word)
            continue
        name, equals, text = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        short = [full for full in kinds if full[0] == name]  # -s is --seed where nothing else begins with s
        name = short[0] if len(short) == 1 else name
        if not equals and rest and not FLAG.match(rest[0]):
            text = rest.pop(0)
        elif not equals and kinds.get(name) is bool:
            text = "True"
        elif not equals and kinds.get(name.removeprefix("no")) is bool:
            name, text = name.removeprefix("no"), "False"
        elif not equals and name in kinds:
            raise ValueError(f"--{name} needs a value; one that begins with dashes is written --{name}=VALUE")
        texts[name] = text
    required = list(kinds)[: len(kinds) - len(main.__defaults__ or ())]
    missing = [name for name in required if name not in texts]
    texts |= zip(missing, words, strict=False)
    return texts if len(words) == len(missing) and texts.keys() <= kinds.keys() else None


def to_value(text, name, main):
    """What the text of an argument of main stands for; ValueError if it is no such thing."""
    kind = main.__annotations__[name]
    try:
        return {"True": True, "False": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {int: "a whole number", float: "a number", bool: "True or False"}[kind]
        raise ValueError(f"--{name} must be {wanted}, not {text!r}") from None


def explain(main, arguments):
    """A function that prints the help; ValueError that says what is wrong with a command line."""
    name = os.path.basename(sys.argv[0])
    if {"-h", "--help"} & set(arguments):
        help_text = ask_fire(main, ["--help"], name).partition("\n\n")[2].partition("\n\nGROUPS")[0]
        letters = [full[0] for full in main.__annotations__]  # fire offers -p for one of two that begin with p
        help_text = re.sub("-([a-z]), --", lambda m: m[0] if letters.count(m[1]) == 1 else "--", help_text)
        return functools.partial(print, help_text.replace("GROUP | ", ""))
    reason = ask_fire(main, arguments, name).partition("\n")[0].removeprefix("ERROR: ")
    what, colon, word = reason.partition("Could not consume arg: ")
    if colon:
        reason = f"{word!r} isn't an argument; a text of several words needs quotes"
    raise ValueError(f"{reason or 'these arguments mean nothing together'} (see python {name} --help)")


def ask_fire(main, arguments, name="", call=lambda **texts: None):
    """What fire writes about a command line of main; if nothing, it accepts it and has called `call` with the texts."""
    import inspect
    import io

    import fire

    @functools.wraps(main)
    def command(*required, **texts):
        call(**dict(zip(parameters, required, strict=False)), **texts)

    parameters = inspect.signature(main).parameters
    command.__signature__ = inspect.Signature(  # a second word without quotes shall not be taken for the next option
        [p if p.default is p.empty else p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
    )
    command.__doc__ += "\n\nArgs:\n" + "".join(f"    {name}: {ARGUMENTS[name]}\n" for name in parameters)
    fire.decorators.SetParseFn(str)(command)
    screen = io.StringIO()
    try:
        with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(io.StringIO()):  # no terminal, so no pager
            # fire ends the arguments of a call at a lone "-"; here that is a text, so another sign is named
            fire.Fire(command, [*arguments, "--", "--separator=\0"], name=name)
    except fire.core.FireExit:
        pass
    except fire.core.FireError as error:  # one that it forgets to explain: a letter that two arguments begin with
        return f"ERROR: {error}"
    return screen.getvalue()


def on_stop_signals(handler):
    """Sets what SIGINT and SIGTERM do; one that the parent ignores, as a script does for `&`, stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def stop(number, frame):
    """Ends a run from anywhere in it. A second signal (`timeout` sends two) doesn't break off what cleans up."""
    on_stop_signals(signal.SIG_IGN)
    raise interruption(number)


def interruption(number):
    """A KeyboardInterrupt that is raised again if it is lost: Python drops what is raised where an import ends, say."""
    stopped = KeyboardInterrupt(number)
    stopped.life = lambda: None
    weakref.finalize(stopped.life, signal.setitimer, signal.ITIMER_REAL, 0.01).atexit = False
    signal.signal(signal.SIGALRM, lambda _, frame: stop(number, frame))
    return stopped


def attempt(main):
    """Calls main with the arguments of the command line, until a signal comes. -> exit status, message or None."""
    sys.unraisablehook = lambda lost: isinstance(lost.exc_value, KeyboardInterrupt) or sys.__unraisablehook__(lost)
    try:
        on_stop_signals(stop)
        call = parse(main, sys.argv[1:])
        if call.keywords.get("prompt") == "-":
            call.keywords["prompt"] = read_input("-").removesuffix("\n")
        call()
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # it isn't lost
        return 128 + (stopped.args or [signal.SIGINT])[0], None
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # without "[Errno 2]"
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return 2 if isinstance(error, ValueError) else 1, message
    return 0, None


def run(main):
    """Calls main with the arguments of the command line, the last thing that a script does; sets its exit status."""
    for name, mode in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # closed, as by `>&-`: writing to stdout fails, stderr is not missed
            setattr(sys, name, open(os.open(os.devnull, mode), "w"))
    sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks becomes "?"
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's about overflow: what comes of it is said in one line
    status, message = attempt(main)
    on_stop_signals(signal.SIG_IGN)
    try:
        if status > 128 and not select.select([], [sys.stdout], [], 0)[1]:
            raise BlockingIOError  # whoever is stopped doesn't wait for a reader that doesn't read
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader that has what it wanted (`| head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at the end shall not fail
        status, message = (status, None) if status > 128 else (1, f"stdout: {error.strerror}")
    if message:
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    if status:
        sys.exit(status)
