"""A real text set that is on every machine: which library does this docstring document?

The sources of paceline's own dependencies and of the standard library are read and parsed, never imported or run. What
would give the answer away is taken out: the libraries' names and module paths, doctests, links and reST directives.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import DataError

LIBRARIES = {
    "numpy": "numpy",
    "python": "",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "torch": "torch",
    "transformers": "transformers",
}
"""Class name -> package; the empty one is the standard library."""

MOST_PER_LIBRARY = 2000
FEWEST_WORDS = 8

_SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "_test", "__pycache__", "site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "ensurepip", "turtledemo", "_vendor"),
}
_NAMES = re.compile(
    r"(?<![A-Za-z0-9_])(numpy|np|ndarrays?|scipy|sp|sklearn|scikit|scikit[-_]?learn|torch\w*|pytorch|aten"
    r"|transformers|huggingface|hf|c?python\w*|pep)(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
# a name takes the whole dotted or slashed path along: "np.array", ":func:`~scipy.stats.norm`", "torch/nn/init.py"
_PATHS = re.compile(r"[\w.:/~`-]+")
_LINKS = re.compile(r"https?://\S+")
_DIRECTIVES = re.compile(r"^\s*\.\. \w[\w-]*::.*$", re.MULTILINE)
_UNDERLINES = re.compile(r"^\s*([-=~^])\1{2,}\s*$\n?", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """One cleaned docstring and where it stands."""

    library: str
    text: str
    file: str
    """Path from the library's root, the library's folder included."""
    line: int


def collect(libraries: Sequence[str] = tuple(LIBRARIES), most: int = MOST_PER_LIBRARY) -> list[Docstring]:
    """At most ``most`` different docstrings of each library, of at least ``FEWEST_WORDS`` words.

    The choice depends on the installed sources alone: files are taken in the order of their paths' digests.

    Raises:
        DataError: a library's sources are not installed.
    """
    seen: set[str] = set()
    chosen: list[Docstring] = []
    for library in libraries:
        before = len(chosen)
        for found in _docstrings(library):
            text = clean(found.text)
            key = " ".join(text.casefold().split())
            if key in seen or len(text.split()) < FEWEST_WORDS:
                continue
            seen.add(key)
            chosen.append(Docstring(library, text, found.file, found.line))
            if len(chosen) - before == most:
                break
    return chosen


def clean(text: str) -> str:
    """``text`` without what gives its library away."""
    text = _LINKS.sub(" ", _without_doctests(text))
    text = _UNDERLINES.sub("", _DIRECTIVES.sub(" ", text))
    if _NAMES.search(text):
        text = _PATHS.sub(lambda path: " " if _NAMES.search(path[0]) else path[0], text.replace("Hugging Face", " "))
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def _without_doctests(text: str) -> str:
    kept = []
    inside = False
    for line in text.splitlines():
        # an example's output goes on to the next empty line
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            kept.append(line)
    return "\n".join(kept)


def _docstrings(library: str) -> Iterator[Docstring]:
    root = _root(library)
    paths = {path.relative_to(root).as_posix(): path for path in _sources(root)}
    for name in sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest()):
        for text, line in _of_file(paths[name]):
            yield Docstring(library, text, f"{library}/{name}", line)


def _root(library: str) -> Path:
    package = LIBRARIES[library]
    if not package:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"builtin:docstrings needs the sources of {library}", why="the package is not installed", fix="reinstall it"
        )
    return Path(spec.submodule_search_locations[0])


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED_FOLDERS and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _of_file(path: Path) -> Iterator[tuple[str, int]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escape sequences
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # templates and samples of bad code are among the sources
    yield from _of_node(tree)


def _of_node(node: ast.AST) -> Iterator[tuple[str, int]]:
    body: list[ast.AST] = getattr(node, "body", [])
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text, getattr(body[0], "lineno", 0)
    for statement in body:
        # definitions also stand under if, try and with
        if isinstance(getattr(statement, "body", None), list):
            yield from _of_node(statement)
