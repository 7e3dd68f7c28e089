"""The command lines of gpt2.py and gpt2_kvcache.py, run as a user runs them, on the bundled model."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store import serving

import batch
import bench
import command_line
import gpt2_kvcache
import speculative
from model_files.download import FILES as DOWNLOADED

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["gpt2.py", "gpt2_kvcache.py"]
NOWHERE = {"GPT2_BASE_URL": "http://127.0.0.1:9/models"}  # a port that refuses connections
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | NOWHERE


def run(script, *arguments, env=None, **options):
    command = [sys.executable, script, *map(str, arguments)]
    options = {"stdin": None if "input" in options else subprocess.DEVNULL, "timeout": 120, **options}
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8", **(env or {})}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, **options)


def fairytale(script, prompt, *arguments, **options):
    return run(script, prompt, "--model_size", "fairytale", *arguments, **options)


def assert_refused(result, status, *parts):
    """One line on stderr that holds all parts, nothing on stdout, this exit status."""
    assert result.returncode == status, result.stderr
    assert result.stdout == b"" and len(result.stderr.splitlines()) == 1, result.stderr.decode()
    for part in parts:
        assert re.search(part, result.stderr.decode()), result.stderr.decode()


WORDS = "x||7|-1|0.5|a=b|-|--|-5=|=|-=|--help|-h|True|None|[1]|é 🙂|-é|--seed|--seed=3|-s|-s=4|---seed|--s|-seed"
WORDS += "|--prompt|--prompt=|--prompt=y|-p|-prompt=-p|--prompt-cache|--n_tokens_to_generate|--n-tokens-to-generate=2"
WORDS += "|-n|-n=5|--top-k|--top_k=1|--top_k=|--rounds=2|--torch|--torch=False|--notorch|--no-torch|-t|--nonsense"
WRITABLE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
ODD = {"--noseed", "__doc__", "--doc--"}  # fire's "seed is False", and a member of what a command returns: refused here


def as_fire_reads(main, arguments):
    """The texts of a command line that fire accepts, else None."""
    calls = []
    complaint = command_line.ask_fire(main, arguments, call=lambda **texts: calls.append(texts))
    return None if complaint else calls[0]


@given(
    st.sampled_from([gpt2_kvcache.main, speculative.main, bench.main, batch.main]),
    st.lists(st.sampled_from([*WORDS.split("|"), *ODD]) | st.text(WRITABLE, max_size=4), max_size=6),
)
@example(batch.main, ["--help", "-n"])
@settings(deadline=None, max_examples=800)
def test_what_fire_accepts_is_read_as_fire_reads_it_and_all_else_is_explained(main, arguments):
    try:
        texts = command_line.split(main, arguments)
    except ValueError as error:  # fire takes a forgotten value for the word True
        assert "needs a value" in str(error)
        names = [i for i, word in enumerate(arguments) if word.startswith("-") and "=" not in word]
        assert any(arguments[i + 1 : i + 2] == [] or arguments[i + 1].startswith("-") for i in names)
        return
    if not ODD & set(arguments) or texts is not None:
        assert texts == as_fire_reads(main, arguments)
    if texts is None:
        with contextlib.suppress(ValueError):
            assert command_line.parse(main, arguments).func is print  # the help


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x --seed 3 --top-k=5", {"prompt": "x", "seed": 3, "top_k": 5}),
        ("--seed=3 x -s 4", {"prompt": "x", "seed": 4}),
        ("--prompt=-5 --temperature -1", {"prompt": "-5", "temperature": -1.0}),
        ("--prompt -5", {"prompt": "-5"}),
        ("--prompt=--seed", {"prompt": "--seed"}),
        ("-", {"prompt": "-"}),
        ("--torch", {"torch": True}),
        ("--torch --rounds 2", {"torch": True, "rounds": 2}),
        ("--rounds 2 --notorch", {"torch": False, "rounds": 2}),
        ("--torch False -r=1", {"torch": False, "rounds": 1}),
    ],
)
def test_every_form_of_a_command_line_is_read_without_fire(line, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "fire", None)
    main = bench.main if "torch" in expected else gpt2_kvcache.main
    call = command_line.parse(main, line.split())
    assert call.func is main and call.args == () and call.keywords == expected
    assert all(type(call.keywords[name]) is type(value) for name, value in expected.items())


def test_an_ordinary_command_imports_nothing_that_it_does_not_use():
    """fire, requests and tqdm take longer than reading the model (issue "Speed": from the shell to the first token)."""
    code = (
        "import sys, runpy\n"
        "sys.argv = ['gpt2_kvcache.py', 'x', '--n_tokens_to_generate=1', '--model_size=fairytale']\n"
        "runpy.run_path('gpt2_kvcache.py', run_name='__main__')\n"
        "print(sorted({'fire', 'asyncio', 'requests', 'tqdm', 'http.client', 'safetensors'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("[]\n"), result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Once", "upon", "a", "time"], "'upon' isn't an argument.*quotes"),
        (["Once", "--temprature", "1"], "'--temprature' isn't an argument"),
        (["Once", "--prompt_cache"], "--prompt_cache needs a value"),
        (["--prompt", "--seed", "3"], "--prompt needs a value"),
        (["--prompt", "-s", "3"], "--prompt needs a value"),
        (["x", "--noseed"], "--help"),
        (["x", "__doc__"], "--help"),
        (["x", "-p", "file"], "'-p' is ambiguous"),
        ([], "prompt"),
    ],
)
def test_what_is_no_argument_is_named(arguments, message):
    assert_refused(run("gpt2_kvcache.py", *arguments), 2, message)


def shell(command):
    """The result of a line for bash, in which $PY is the Python of the tests."""
    environment = {**ENVIRONMENT, "PY": sys.executable}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, timeout=120)


def test_a_closed_stdout_or_stderr_is_no_traceback():
    for redirection, expected in ((">&-", b""), ("2>&-", b"xed")):
        result = shell(f"$PY gpt2_kvcache.py x --n_tokens_to_generate 3 --model_size fairytale {redirection}")
        assert result.stdout.startswith(expected) and b"Traceback" not in result.stderr
        assert result.returncode == (redirection == ">&-")


@pytest.mark.parametrize("prompt", ["Once upon a time", "", "日本 🙂 und Ä", "def f(x):\n    return", " \n\t "])
def test_both_scripts_print_the_same_bytes_and_nothing_else(prompt):
    plain, cached = (fairytale(script, prompt, "--n_tokens_to_generate", 25) for script in SCRIPTS)
    assert plain.returncode == cached.returncode == 0
    assert plain.stdout == cached.stdout != b""
    assert plain.stderr == cached.stderr
    assert len(plain.stderr.splitlines()) == 1 and b"fairytale" in plain.stderr


@pytest.mark.parametrize(
    "prompt",
    [
        "123",
        "1e3",
        "[1, 2]",
        "True",
        "None",
        "007",
        '"quoted"',
        "{'a': 1}",
        "-5 degrees",
        "a=b",
        "1,2",
        "0x10",
        "'",
    ],
)
def test_a_prompt_is_taken_verbatim(prompt):
    """What the script makes of the argument equals what the library makes of the string."""
    code = (
        "import sys; from gpt2_kvcache import generate; from utils import load_encoder_hparams_and_params as load\n"
        "encoder, hparams, params = load('fairytale', None)\n"
        "ids = generate(encoder.encode(sys.argv[1]), params, hparams['n_head'], 8, end_of_text=encoder.end_of_text)\n"
        "sys.stdout.write(encoder.decode(ids))\n"
    )
    expected = run("-c", code, prompt)
    for form in ([prompt], [f"--prompt={prompt}"]):
        result = run("gpt2_kvcache.py", *form, "--model_size", "fairytale", "--n_tokens_to_generate", 8)
        assert result.returncode == 0 and result.stdout == expected.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_zero_tokens_print_nothing(script):
    result = fairytale(script, "Once", "--n_tokens_to_generate", 0)
    assert result.returncode == 0 and result.stdout == b""


def test_the_same_seed_prints_the_same_text_and_another_seed_another():
    options = ["--temperature", 0.9, "--top_k", 100, "--top_p", 0.95, "--seed"]
    plain, cached = (fairytale(script, "The king", *options, 5).stdout for script in SCRIPTS)
    assert plain == cached != fairytale("gpt2_kvcache.py", "The king", *options, 6).stdout


def test_without_a_model_named_the_bundled_one_runs_where_the_host_cannot_be_reached(tmp_path):
    for script in SCRIPTS:
        result = run(script, "Once", "--models_dir", tmp_path, "--n_tokens_to_generate", 3)
        assert result.returncode == 0 and result.stdout == fairytale(script, "Once", "--n_tokens_to_generate", 3).stdout
        assert len(result.stderr.splitlines()) == 1
        assert b"fairytale" in result.stderr and b"--model_size 124M" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_size_that_is_asked_for_never_falls_back(tmp_path):
    for script in SCRIPTS:
        result = run(script, "Once", "--model_size", "124M", "--models_dir", tmp_path)
        assert_refused(result, 1, "127.0.0.1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--model_size", "125M"], "125M.*124M.*355M.*774M.*1558M.*fairytale"),
        (["x", "--model_size", "../models/fairytale"], "fairytale"),
        (["x", "--model_size", ".."], r"'\.\.'"),
        (["x", "--model_size", ""], "''"),
        (["x", "--n_tokens_to_generate", "-1"], "n_tokens_to_generate .* -1"),
        (["x", "--n_tokens_to_generate", "2.5"], "n_tokens_to_generate .* '2.5'"),
        (["x", "--n_tokens_to_generate", "many"], "n_tokens_to_generate .* 'many'"),
        (["x", "--n_tokens_to_generate"], "n_tokens_to_generate"),
        (["x", "--temperature", "nan"], "temperature .* nan"),
        (["x", "--temperature", "-1"], "temperature .* -1"),
        (["x", "--temperature", "warm"], "temperature .* 'warm'"),
        (["x", "--top_k", "0"], "top_k .* 0"),
        (["x", "--top_p", "1.5"], "top_p .* 1.5"),
        (["x", "--seed", "-4"], "seed .* -4"),
        (["x", "--colour", "red"], "--colour.*--help"),
        ([], "prompt.*--help"),
        (["--n_tokens_to_generate", "3"], "prompt.*--help"),
    ],
)
def test_bad_input_is_one_line_and_status_2_before_anything_is_loaded(script, arguments, message, tmp_path):
    if "--model_size" not in arguments:
        arguments = [*arguments, "--model_size", "124M"]  # not here: whoever began to load it would fail with status 1
    assert_refused(run(script, *arguments, "--models_dir", tmp_path), 2, message)
    assert not list(tmp_path.iterdir())


def test_a_models_dir_that_is_a_file_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(run("gpt2_kvcache.py", "x", "--models_dir", tmp_path / "file"), 2, "is a file")


@pytest.fixture
def model_copy(tmp_path):
    return shutil.copytree(ROOT / "models" / "fairytale", tmp_path / "mine")


FILES = [
    "checkpoint",
    "encoder.json",
    "hparams.json",
    "model.ckpt.data-00000-of-00001",
    "model.ckpt.index",
    "vocab.bpe",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "html"])
def test_a_missing_or_damaged_file_is_named(model_copy, name, damage):
    path = model_copy / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {"empty": b"", "cut": content[: len(content) // 3], "html": b"<html>Not found</html>\n"}[damage]
        )
    arguments = ["--model_size", "mine", "--models_dir", model_copy.parent]
    for script in SCRIPTS:
        assert_refused(run(script, "x", *arguments), 1, re.escape(name))


def test_hparams_that_do_not_fit_the_weights_name_the_tensor_and_both_shapes(model_copy):
    path = model_copy / "hparams.json"
    path.write_text(path.read_text().replace('"n_ctx": 256', '"n_ctx": 512'))
    result = run("gpt2.py", "x", "--model_size", "mine", "--models_dir", model_copy.parent)
    assert_refused(result, 1, "wpe", "256", "512")


@pytest.mark.parametrize("script", [*SCRIPTS, "batch.py", "evaluate.py"])
def test_help_explains_every_argument(script):
    for form in (["--help"], ["-h"], ["x", "--help"]):
        result = run(script, *form)
        assert result.returncode == 0 and result.stderr == b""
        for name in ("SYNOPSIS", "--model_size", "124M", "--models_dir"):
            assert name in result.stdout.decode()
        assert "FIRE" not in result.stdout.decode()


def test_help_offers_no_letter_that_is_refused():
    """fire writes -p for --prompt_cache, and takes it for --prompt too."""
    for script, right, wrong in (("gpt2_kvcache.py", b"-s, --seed", b"-p"), ("gpt2.py", b"-s, --seed", b"-t, ")):
        stdout = run(script, "--help").stdout
        assert right in stdout and wrong not in stdout.replace(b"--prompt", b"")


def test_help_on_a_terminal_goes_through_no_pager(monkeypatch):
    monkeypatch.setenv("PAGER", "true")
    output, _, errors, status = on_a_terminal(["--help"], 0, None)
    assert status == 0 and errors == b"" and b"--prompt_cache" in output and b"FIRE" not in output


def test_a_reader_that_has_enough_is_one_line():
    """Not silence: what was meant to be written is lost."""
    arguments = "x --n_tokens_to_generate 9999 --model_size fairytale"
    result = shell(f"$PY gpt2_kvcache.py {arguments} | head -c 1; exit ${{PIPESTATUS[0]}}")
    _, line = result.stderr.splitlines()  # the first names the model
    assert result.returncode == 1 and len(result.stdout) == 1 and line == b"gpt2_kvcache.py: stdout: Broken pipe"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("script", [*SCRIPTS, "speculative.py", "batch.py", "evaluate.py"])
def test_a_full_disk_is_one_line(script, tmp_path):
    (tmp_path / "text").write_text("The king\n")
    for argument in (tmp_path / "text", "--help"):
        result = shell(f"$PY {script} {argument} --model_size fairytale > /dev/full")
        *before, last = result.stderr.splitlines()
        assert result.returncode == 1 and last.decode() == f"{script}: stdout: No space left on device"
        assert len(before) == (argument != "--help")


def test_a_working_directory_that_is_gone_does_not_matter(tmp_path):
    (tmp_path / "text").write_text("The king\n")
    (tmp_path / "gone").mkdir()
    for script, argument in (("gpt2_kvcache.py", "x"), ("batch.py", tmp_path / "text"), ("gpt2.py", "--help")):
        arguments = f"{argument} --n_tokens_to_generate 3 --model_size fairytale"
        lost = shell(f"mkdir -p {tmp_path}/gone; cd {tmp_path}/gone; rmdir $PWD; $PY {ROOT}/{script} {arguments}")
        assert lost.returncode == 0 and lost.stdout == run(script, *arguments.split()).stdout != b""


@pytest.mark.parametrize("script", [*SCRIPTS, "speculative.py"])
def test_a_prompt_comes_from_stdin(script):
    options = ["--n_tokens_to_generate", 4, "--model_size", "fairytale"]
    expected = run(script, "The king\nhad é 🙂", *options).stdout
    result = run(script, "-", *options, input="The king\nhad é 🙂\n".encode())
    assert result.returncode == 0 and result.stdout == expected != b""


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"a", "a"), (b"a\n", "a"), (b"a\n\n", "a\n"), (b"\xef\xbb\xbfa\r\nb\r\n", "a\nb"), (b"", ""), (b"-", "-")],
)
def test_a_line_end_at_the_end_of_stdin_is_not_the_prompt_s(data, prompt):
    code = "import command_line\ndef main(prompt: str): print(repr(prompt))\ncommand_line.run(main)"
    for words in (["-"], ["--prompt=-"], ["--prompt", "-"]):
        assert eval(run("-c", code, *words, input=data).stdout) == prompt


def test_a_prompt_from_stdin_may_be_longer_than_an_argument():
    prompt = "once upon a time there was " * 8000
    result = fairytale("gpt2_kvcache.py", "-", "--n_tokens_to_generate", 3, input=prompt.encode())
    tail = fairytale("gpt2_kvcache.py", prompt[len(prompt) // 2 :], "--n_tokens_to_generate", 3)
    assert result.returncode == 0 and result.stdout == tail.stdout != b""


def test_a_prompt_from_stdin_that_cannot_be_read_is_one_line(tmp_path):
    arguments = ["--model_size", "124M", "--models_dir", tmp_path]
    assert_refused(run("gpt2_kvcache.py", "-", *arguments, input=b"caf\xe9"), 2, "stdin isn't UTF-8 text: byte 3 is")
    assert_refused(shell("$PY gpt2_kvcache.py - --model_size fairytale <&-"), 1, "stdin is closed")


def on_a_terminal(arguments, until, then):
    """Runs the cached script with stdout a pseudo-terminal; calls then(process) once `until` bytes have come."""
    master, slave = pty.openpty()
    command = [sys.executable, "gpt2_kvcache.py", *map(str, arguments), "--model_size", "fairytale"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=subprocess.PIPE)
    os.close(slave)
    output, pieces = b"", 0
    with limit(process), contextlib.suppress(OSError):  # which is how reading says that the other end is closed
        while data := os.read(master, 4096):
            output, pieces = output + data, pieces + 1
            if len(output) >= until and then:
                then(process)
                then = None
    os.close(master)
    return output.replace(b"\r\n", b"\n"), pieces, process.communicate()[1], process.returncode


def test_text_appears_on_a_terminal_as_it_is_written():
    expected = fairytale("gpt2_kvcache.py", "Once upon a time", "--n_tokens_to_generate", 120).stdout
    output, pieces, _, status = on_a_terminal(["Once upon a time", "--n_tokens_to_generate", 120], 0, None)
    assert output == expected + b"\n" and status == 0 and pieces > 3


@pytest.fixture
def heeded_sigint():
    """Processes that are started inherit an ignored SIGINT, as of a suite that a script runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
ENDLESS = ["Once upon a time", "--n_tokens_to_generate", "100000", "--model_size", "fairytale"]


@pytest.fixture
def start():
    """A function that starts a script. It ends with the test, and after a minute in any case."""
    with contextlib.ExitStack() as stack:

        def start(*command, before=(), **options):
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT, **options}
            process = subprocess.Popen([*before, sys.executable, *map(str, command)], cwd=ROOT, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            stack.enter_context(limit(process))
            return process

        yield start


@contextlib.contextmanager
def limit(process):
    timer = threading.Timer(60, process.kill)
    timer.start()
    yield
    timer.cancel()


@pytest.mark.parametrize(("number", "status"), ENDINGS)
def test_a_signal_leaves_what_was_written_on_a_terminal(number, status, heeded_sigint):
    arguments = ["Once upon a time", "--n_tokens_to_generate", 100_000]
    output, _, errors, ended = on_a_terminal(arguments, 40, lambda process: process.send_signal(number))
    expected = fairytale("gpt2_kvcache.py", "Once upon a time", "--n_tokens_to_generate", 8).stdout
    assert ended == status and output.startswith(expected) and len(errors.splitlines()) == 1


@pytest.mark.parametrize("script", [*SCRIPTS, "speculative.py"])
@pytest.mark.parametrize(("number", "status"), ENDINGS)
def test_text_goes_to_a_pipe_as_it_is_written_and_stays_after_a_signal(script, number, status, heeded_sigint, start):
    process = start(script, *ENDLESS)
    output = b""
    while len(output) < 40 and (data := os.read(process.stdout.fileno(), 8192)):
        output += data
    assert 0 < len(output) < 4096  # Python would keep 8,192 bytes together
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    expected = fairytale("gpt2_kvcache.py", "Once upon a time", "--n_tokens_to_generate", 8).stdout
    assert process.returncode == status and (output + rest).startswith(expected) and len(errors.splitlines()) == 1


def test_text_goes_to_a_file_as_it_is_written(tmp_path, start):
    with open(tmp_path / "out", "wb") as file:
        process = start("gpt2_kvcache.py", *ENDLESS, stdout=file)
        wait_until(lambda: os.path.getsize(file.name) > 40)
        assert os.path.getsize(file.name) < 4096
        process.kill()
        process.communicate(timeout=60)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_script_that_is_stopped_waits_for_no_reader(start):
    def n_waiting():
        return int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)

    code = "import command_line\ndef main():\n    while True: print('x' * 99, flush=True)\ncommand_line.run(main)"
    process = start("-c", code)
    wait_until(lambda: n_waiting() > 60_000)  # of 65,536 that fit
    time.sleep(0.2)
    process.terminate()
    assert process.wait(timeout=20) == 143


@pytest.mark.parametrize(("number", "status"), ENDINGS)
def test_a_second_signal_does_not_break_off_what_cleans_up(number, status, heeded_sigint, start):
    code = """
import command_line, time
def main():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(0.3)
        print("clean")
command_line.run(main)
"""
    process = start("-c", code)
    for line in (b"begun\n", b"cleaning\n"):
        assert process.stdout.readline() == line
        process.send_signal(number)
    assert process.communicate(timeout=60) == (b"clean\n", b"") and process.returncode == status


@pytest.mark.parametrize("lose", ["del thing", "try: callback(0)\n    except BaseException: pass"])
def test_a_signal_ends_a_run_even_if_the_exception_that_it_raises_is_lost(lose, start):
    """Python drops what a callback raises, and has one where an import ends; C code clears errors here and there."""
    code = """
import command_line, os, signal, time, weakref
def callback(_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
class Thing: pass
def main():
    thing = Thing()
    reference = weakref.ref(thing, callback)
    LOSE
    time.sleep(30)
command_line.run(main)
"""
    process = start("-c", code.replace("LOSE", lose))
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == 143


def test_a_signal_that_the_parent_ignores_stays_ignored(start):
    command = [sys.executable, "gpt2_kvcache.py", *ENDLESS]
    process = start("-c", f"import os, signal; signal.signal(2, signal.SIG_IGN); os.execv({command[0]!r}, {command})")
    process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    process.stdout.read(400)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="makes a container")
def test_a_signal_ends_the_first_process_of_a_container(start):
    """There a signal that nobody handles does nothing."""
    container = start("gpt2_kvcache.py", *ENDLESS, before=["unshare", "-pf", "--kill-child"])
    if not os.read(container.stdout.fileno(), 100):
        pytest.skip(container.communicate()[1].decode())  # no right to
    first = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text()
    os.kill(int(first), signal.SIGTERM)
    _, errors = container.communicate(timeout=60)
    assert container.returncode == 143 and len(errors.splitlines()) == 1


def test_sigterm_stops_a_download_that_can_go_on_later(tmp_path, start):
    with serving({name: bytes(50_000) for name in DOWNLOADED}) as store:
        store.rate = 20_000
        address = {"GPT2_BASE_URL": store.url, "NO_PROXY": "127.0.0.1"}
        arguments = ["x", "--model_size", "124M", "--models_dir", tmp_path]
        process = start("gpt2_kvcache.py", *arguments, env=ENVIRONMENT | address)
        wait_until(lambda: store.sent > 5000)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and output == b"" and b"Traceback" not in errors
    assert errors.splitlines()[-1] == b"gpt2: download stopped; the same command goes on from here"


@pytest.mark.parametrize("moment", [0.02, 0.1, 0.2, 0.3, 0.4])
def test_sigterm_ends_a_script_at_any_moment_of_its_start(moment, start):
    process = start("gpt2_kvcache.py", *ENDLESS)
    time.sleep(moment)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM) and b"Traceback" not in errors  # both are 143 to a shell


def test_streamed_characters_are_never_split():
    """Random ids are broken and whole characters; the pieces join to what decoding all at once gives."""
    import io

    import numpy as np

    import command_line
    from encoder import get_encoder

    encoder = get_encoder("fairytale", ROOT / "models")
    ids = encoder.encode("日本語 🙂 naïve ") + np.random.default_rng(0).integers(0, 300, 400).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        command_line.write_text(iter(ids), encoder, len(ids))
        written = sys.stdout.getvalue()
    assert written == encoder.decode(ids) and "日本語 🙂 naïve " in written


@pytest.mark.parametrize("prompt", [b"\xff\xfe broken", b"caf\xe9"])
def test_a_prompt_that_is_not_utf8_still_runs(prompt):
    command = [sys.executable.encode(), b"gpt2_kvcache.py", prompt, b"--model_size", b"fairytale"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert result.returncode == 0 and result.stdout and b"Traceback" not in result.stderr


def test_a_terminal_in_latin_1_or_ascii_gets_question_marks_not_a_traceback():
    for encoding in ("latin-1", "ascii"):
        result = fairytale(
            "gpt2_kvcache.py", "日本 🙂", "--temperature", 5, "--seed", 1, env={"PYTHONIOENCODING": encoding}
        )
        assert result.returncode == 0 and result.stdout and b"Traceback" not in result.stderr


def test_a_very_long_prompt_runs():
    """100 kB is near what one argument may hold (128 kB on Linux)."""
    result = fairytale("gpt2_kvcache.py", "once upon a time " * 6000, "--n_tokens_to_generate", 3)
    assert result.returncode == 0 and result.stdout


@pytest.mark.weights
def test_picogpt_s_published_text():
    """Needs OpenAI's weights in models/124M: python gpt2.py 'x' --model_size 124M downloads them."""
    prompt = "Alan Turing theorized that computers would one day become"
    text = (
        " the most powerful machines on the planet.\n\nThe computer is a machine that can perform complex calculations,"
        " and it can perform these calculations in a way that is very similar to the human brain."
    )
    for script in SCRIPTS:
        result = run(script, prompt, "--n_tokens_to_generate", 40, "--model_size", "124M")
        assert result.stdout.decode() == text, result.stderr
