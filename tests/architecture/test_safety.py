"""What no source file may do: execute what comes with data or weights; and no wait for the device in the hot path."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"

STEP_LINES = 60

HOT = ("engine/step.py", "run/loop.py")
"""Files that run once a step or oftener."""

WAITS = {"item", "cpu", "synchronize"}
"""Methods that make the host wait for the device."""

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}

HARMLESS_NAMES = {"PickleError", "UnpicklingError"}
"""Exceptions of those modules, which torch's restricted reader raises."""

UNSAFE_CALLS = {
    "eval": "executes text",
    "exec": "executes text",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "torch.load": "reads pickles",
    "torch.save": "writes a pickle",
    "pandas.read_pickle": "reads a pickle",
    "pd.read_pickle": "reads a pickle",
    "yaml.load": "may execute tags",
    "yaml.load_all": "may execute tags",
    "yaml.unsafe_load": "executes tags",
    "yaml.full_load": "may execute tags",
}

ALLOWED: dict[tuple[str, str], Callable[[ast.Call], bool]] = {
    ("models/convert.py", "torch.load"): lambda call: _keyword(call, "weights_only") is True,
    ("recipe/recipe.py", "yaml.load"): lambda call: _keyword(call, "Loader") == "_Loader",  # a SafeLoader
    ("report/build.py", "yaml.load"): lambda call: _keyword(call, "Loader") == "BoundedLoader",  # a SafeLoader
}
"""(file, call) -> the form in which it is safe."""

UNSAFE_KEYWORDS = {"allow_pickle": True, "shell": True, "trust_remote_code": True, "weights_only": False}


def unsafe(source: Path) -> list[str]:
    """Every import, call and argument that could execute what a user's data or weights bring."""
    problems = []
    for path, tree in _trees(source):
        for node in ast.walk(tree):
            for message in _unsafe_imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                problems.append(f"{path}:{node.lineno}: {message}")
            if not isinstance(node, ast.Call):
                continue
            name = _dotted(node.func)
            safe = ALLOWED.get((path, name))
            if name in UNSAFE_CALLS and not (safe and safe(node)):
                problems.append(f"{path}:{node.lineno}: {name}() {UNSAFE_CALLS[name]}")
            for keyword, value in UNSAFE_KEYWORDS.items():
                if _keyword(node, keyword) is value:
                    problems.append(f"{path}:{node.lineno}: {keyword}={value}")
    return problems


def waits(source: Path) -> list[str]:
    """Every call in the hot files that waits for the device."""
    return [
        f"{path}:{node.lineno}: .{node.func.attr}() waits for the device"
        for path, tree in _trees(source)
        if path in HOT
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
    ]


INTERPRETER = "contract/interpreter.py"


def interpreters(source: Path) -> list[str]:
    """Every place that could start a Python and is not ``contract/interpreter.py``, which leaves the folder out."""
    return [
        f"{path}:{node.lineno}: {name} starts a Python; {INTERPRETER} does"
        for path, tree in _trees(source)
        if path != INTERPRETER
        for node in ast.walk(tree)
        for name in _interpreters(node)
    ]


def _interpreters(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _dotted(node) in ("sys.executable", "sys._base_executable", "sys.orig_argv"):
        yield _dotted(node)
    if isinstance(node, ast.ImportFrom) and node.module == "sys":
        yield from (f"sys.{alias.name}" for alias in node.names)
    if isinstance(node, ast.List | ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant):
        first = str(node.elts[0].value)
        yield from [repr(first)] * bool(re.fullmatch(r"python[\d.]*", first))


def undecodable(source: Path) -> list[str]:
    """Calls that read another program's output as text, and fail at bytes that are not UTF-8."""
    found = []
    for file, tree in _trees(source):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        reading = [call for call in calls if _keyword(call, "text") is True and _keyword(call, "errors") is None]
        found += [f"{file}:{call.lineno}" for call in reading]
    return found


def step_lines(source: Path) -> int:
    """Lines of the file to read first."""
    return len((source / "engine" / "step.py").read_text(encoding="utf-8").splitlines())


def _unsafe_imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= HARMLESS_NAMES:
        return
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        if name.partition(".")[0] in UNSAFE_MODULES:
            yield f"imports {name}, which executes what it reads"
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if f"{node.module}.{alias.name}" in UNSAFE_CALLS:
                yield f"imports {node.module}.{alias.name} under another name"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _keyword(call: ast.Call, name: str) -> object:
    """The constant, or the name, given for a keyword argument; None when it is not given so."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else _dotted(keyword.value)
    return None


def _trees(source: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_of_a_users_is_executed() -> None:
    assert not unsafe(SOURCE), "\n".join(unsafe(SOURCE))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("data/a.py", "import pickle"),
        ("data/a.py", "from joblib import load"),
        ("data/a.py", "from pickle import UnpicklingError, load"),
        ("data/a.py", "x = eval(text)"),
        ("data/a.py", "exec(text)"),
        ("data/a.py", "import torch\ntorch.load(path, weights_only=True)"),
        ("models/convert.py", "import torch\ntorch.load(path)"),
        ("models/convert.py", "import torch\ntorch.load(path, weights_only=False)"),
        ("data/a.py", "from torch import load"),
        ("data/a.py", "import torch\ntorch.save(state, path)"),
        ("recipe/recipe.py", "import yaml\nyaml.load(text, Loader=yaml.Loader)"),
        ("data/a.py", "import yaml\nyaml.load(text, Loader=_Loader)"),
        ("data/a.py", "numpy.load(path, allow_pickle=True)"),
        ("data/a.py", "subprocess.run(command, shell=True)"),
        ("models/a.py", "load(name, trust_remote_code=True)"),
    ],
)
def test_the_guard_sees_unsafe_code(tmp_path: Path, file: str, code: str) -> None:
    _plant(tmp_path, file, code)
    assert unsafe(tmp_path), f"not seen in {file}: {code}"


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("models/convert.py", "import torch\ntorch.load(path, weights_only=True, map_location='cpu')"),
        ("recipe/recipe.py", "import yaml\nyaml.load(text, Loader=_Loader)"),
        ("models/convert.py", "from pickle import UnpicklingError"),
        ("data/a.py", '"""No pickle is read."""\nmodel.eval()\nload(name, trust_remote_code=part.trust)'),
    ],
)
def test_the_guard_lets_safe_code_pass(tmp_path: Path, file: str, code: str) -> None:
    _plant(tmp_path, file, code)
    assert not unsafe(tmp_path)


def test_step_and_loop_never_wait_for_the_device() -> None:
    missing = [name for name in HOT if not (SOURCE / name).is_file()]
    assert not missing, f"the guard looks at files that are not there: {missing}"
    assert not waits(SOURCE), "\n".join(waits(SOURCE))


@pytest.mark.parametrize("code", ["x = loss.item()", "x = loss.detach().cpu()", "torch.cuda.synchronize()"])
def test_the_guard_sees_waits(tmp_path: Path, code: str) -> None:
    _plant(tmp_path, "engine/step.py", f"def step():\n    {code}")
    _plant(tmp_path, "run/step_records.py", code)
    assert len(waits(tmp_path)) == 1, "it looks at the hot files, and at those only"


def test_one_function_starts_every_python() -> None:
    assert (SOURCE / INTERPRETER).is_file()
    assert not interpreters(SOURCE), "\n".join(interpreters(SOURCE))


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run([sys.executable, '-m', 'paceline'])",
        "from sys import executable",
        "subprocess.run(['python3', 'script.py'])",
    ],
)
def test_the_guard_sees_another_start_of_python(tmp_path: Path, code: str) -> None:
    _plant(tmp_path, "memory/a.py", code)
    _plant(tmp_path, INTERPRETER, code)
    assert len(interpreters(tmp_path)) == 1


def test_output_of_other_programs_is_read_whatever_its_bytes() -> None:
    assert not undecodable(SOURCE), 'pass errors="replace"'


def test_the_guard_sees_output_that_cannot_be_decoded(tmp_path: Path) -> None:
    _plant(tmp_path, "a.py", 'subprocess.run(command, text=True)\nsubprocess.run(c, text=True, errors="replace")')
    assert undecodable(tmp_path) == ["a.py:1"]


def test_the_step_fits_on_a_screen() -> None:
    assert step_lines(SOURCE) <= STEP_LINES, f"engine/step.py has {step_lines(SOURCE)} lines, more than {STEP_LINES}"


def test_the_guard_counts_the_steps_lines(tmp_path: Path) -> None:
    _plant(tmp_path, "engine/step.py", "pass\n" * (STEP_LINES + 1))
    assert step_lines(tmp_path) > STEP_LINES


def _plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
