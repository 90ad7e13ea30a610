"""The user's own functions: found, of the right form, and their errors told as theirs."""

from __future__ import annotations

import site
import sys
from pathlib import Path

import pytest

from paceline.contract.errors import DataError, RecipeError
from paceline.contract.references import library_of, resolve, users_code


def test_a_function_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reference.py").write_text("def rate(step, total_steps, floor=0): return floor\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    function = resolve("own_reference:rate", "schedule.type", ("step", "total_steps"))
    monkeypatch.delitem(sys.modules, "own_reference")
    assert function(1, 2) == 0
    assert sys.path == path


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:f", "there is no module nowhere"),
        ("json:laods", "did you mean 'loads'"),
        ("json:decoder", "it is not a function"),
        ("json:loads", r"it is called as loads\(logits, labels\)(.|\n)*def loads\(logits, labels\): ..."),
    ],
)
def test_a_function_that_cannot_be_meant(reference: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(reference, "task.loss", ("logits", "labels"))


def test_a_function_that_does_not_tell_its_form_is_taken() -> None:
    assert resolve("builtins:max", "task.loss", ("logits", "labels")) is max


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which packages are installed, with a stand-in for torchvision."""
    folder = tmp_path / "site-packages"
    (folder / "torchvision" / "models").mkdir(parents=True)
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "models" / "__init__.py").write_text("def resnet18(num_classes): return num_classes\n")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(folder)])
    monkeypatch.syspath_prepend(folder)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder
    for name in ("torchvision", "torchvision.models"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("site_packages")
def test_models_of_an_installed_library_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert library_of("torchvision.models:resnet18") == "torchvision"
    assert library_of("torchvision.models.resnet:resnet18") == "torchvision"
    assert resolve("torchvision.models:resnet18", "model.factory")(3) == 3
    for other in ("torchvision.datasets:MNIST", "torchvision.modelsx:f", "torchvisions.models:f", "nets:f", "", "a"):
        assert library_of(other) is None, other


def test_a_package_that_is_not_installed_is_no_library(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the current folder, which comes first, may have come with it."""
    work = tmp_path / "work"
    (work / "torchvision").mkdir(parents=True)
    (work / "torchvision" / "__init__.py").touch()
    monkeypatch.chdir(work)
    assert library_of("torchvision.models:resnet18") is None
    (work / "torchvision" / "__init__.py").unlink()  # a namespace gives way to a package
    assert library_of("torchvision.models:resnet18") == "torchvision"
    (site_packages / "torchvision" / "__init__.py").unlink()
    assert library_of("torchvision.models:resnet18") is None


def test_a_library_finds_nothing_in_the_current_folder(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site_packages / "torchvision" / "models" / "__init__.py").write_text("import planted_beside_a_run\n")
    (tmp_path / "planted_beside_a_run.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="it needs the module planted_beside_a_run"):
        resolve("torchvision.models:resnet18", "model.factory")
    assert "planted_beside_a_run" not in sys.modules


def test_errors_of_the_users_code_are_the_users() -> None:
    told = r"task.loss = a:b: failed\n.*ZeroDivisionError.*test_references.py:\d+"
    with pytest.raises(RecipeError, match=told), users_code("task.loss = a:b"):
        1 / 0  # noqa: B018
    for error in (DataError("ours"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), users_code("task.loss = a:b"):
            raise error
