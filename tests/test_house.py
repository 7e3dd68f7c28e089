"""What can be checked of how the project is built: the files, the ways that imports go, the length of functions."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
    for path in (*ROOT.glob("*.py"), *(ROOT / "model_files").glob("*.py"))
}
ENGINE = {"gpt2", "gpt2_kvcache", "kvcache", "fast", "sampling"}


def imports(tree):
    """The names of the project's modules that a module imports, but for what only its command line needs."""
    nodes = [node for node in tree.body if getattr(node, "name", "") != "main" and not isinstance(node, ast.If)]
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from MODULES.keys() & set(names)


def test_the_top_level_is_small():
    assert len(list(ROOT.glob("*.py"))) <= 15


@pytest.mark.parametrize(("name", "n_lines"), [("gpt2", 135), ("gpt2_kvcache", 140)])
def test_the_pair_that_is_the_lesson_stays_short(name, n_lines):
    assert len((ROOT / f"{name}.py").read_text().splitlines()) <= n_lines


def test_imports_go_one_way():
    left = {name: set(imports(tree)) for name, tree in MODULES.items()}
    while left:
        leaves = {name for name, needed in left.items() if not needed & left.keys()}
        assert leaves, f"imports in a circle: {sorted(left)}"
        left = {name: needed for name, needed in left.items() if name not in leaves}


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_the_engine_imports_only_itself(name):
    assert set(imports(MODULES[name])) <= ENGINE


def test_the_wing_of_files_imports_only_the_encoder_and_the_error():
    for name, tree in MODULES.items():
        if name.startswith("model_files"):
            outside = {needed for needed in imports(tree) if not needed.startswith("model_files")}
            assert outside <= {"encoder", "errors"}, name


def test_the_command_line_imports_nothing_of_the_project():
    assert not set(imports(MODULES["command_line"])) - {"errors"}


def test_no_function_but_a_main_is_longer_than_40_lines():
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "main":
                assert node.end_lineno - node.lineno < 40, f"{name}.{node.name}"


def test_no_function_but_a_main_takes_more_than_7_parameters():
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                n = len([one for one in parameters if one.arg not in ("self", "kvcache", "n_out", "n_logits")])
                assert n <= 7, f"{name}.{node.name}"
