"""Kernels are launched where they are called, or compiled side by side; stand-ins take the place of Triton's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.kernels import launch as launching
from paceline.kernels.launch import compiled_together, launch, only_noted

GPU = torch.device("cuda", 0)


class Kernel:
    """Notes what is done with it, as Triton's functions are called."""

    def __init__(self, error: Exception | None = None) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []
        self.threads: set[int] = set()
        self.loaded_by: set[int] = set()
        self.error = error
        self.when_compiled: Callable[[], None] = lambda: None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))

    @property
    def run(self) -> Any:
        """What launches the compiled kernel; it is built when it is first asked for."""
        self.loaded_by.add(threading.get_ident())
        return self.launched.append

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert self.goes_on.wait(10), "the kernels are compiled one after the other"
        self.threads.add(threading.get_ident())
        self.compiled.append((grid, arguments, options))
        if self.error is not None:
            raise self.error
        self.when_compiled()
        return self


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with Triton and a GPU, whose compiler is awake."""
    monkeypatch.setattr(launching, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(launching, "wake_compiler", lambda index: None)
    yield
    assert launching._noted is None


def test_a_kernel_is_launched_at_once() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch(kernel, (2,), x, 3, BLOCK=16)
    assert kernel.launched == [((2,), (x, 3), {"BLOCK": 16})]
    assert not kernel.compiled


def test_together_kernels_are_compiled_on_other_threads_and_not_launched() -> None:
    first, second = Kernel(), Kernel()
    first.goes_on.clear()  # until the second is through
    second.when_compiled = first.goes_on.set
    x = torch.zeros(4)
    with compiled_together(GPU):
        launch(first, (2,), x, 3, BLOCK=16)
        launch(second, (5,), x, BLOCK=16)
        assert not first.compiled
    ((grid, (pointer, number), options),) = first.compiled
    assert (grid, number, options) == ((2,), 3, {"BLOCK": 16})
    assert (pointer.dtype, pointer.data_ptr()) == (x.dtype, x.data_ptr())
    assert len(second.compiled) == 1
    assert not first.launched
    assert not second.launched
    assert threading.get_ident() not in first.threads | second.threads
    assert first.loaded_by == first.threads, "what launches it is built where it is compiled"
    assert second.loaded_by == second.threads
    launch(first, (2,), x, 3, BLOCK=16)
    assert len(first.launched) == 1


@pytest.mark.parametrize(
    ("other", "times"),
    [
        (lambda x: ((x.clone(), 32, 0.5), {"BLOCK": 16}), 1),
        (lambda x: ((x.clone(), 48, 7.5), {"BLOCK": 16}), 1),
        (lambda x: ((x.clone(), 33, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((x.clone(), 1, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((x.clone(), 2**40, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((x[1:], 32, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((x.half(), 32, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((None, 32, 0.5), {"BLOCK": 16}), 2),
        (lambda x: ((x.clone(), 32, 0.5), {"BLOCK": 32}), 2),
    ],
    ids=["alike", "other numbers", "not by 16", "one", "64 bits", "not aligned", "type", "none", "option"],
)
def test_what_triton_would_compile_twice_is_compiled_twice(other: Any, times: int) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    arguments, options = other(x)
    with compiled_together(GPU):
        launch(kernel, (2,), x, 32, 0.5, BLOCK=16)
        launch(kernel, (2,), *arguments, **options)
    assert len(kernel.compiled) == times


def test_kernels_that_are_only_noted_are_neither_compiled_nor_launched() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    with only_noted(GPU) as noted:
        launch(kernel, (2,), x, 3, BLOCK=16)
    assert len(noted) == 1
    assert not kernel.compiled
    assert not kernel.launched
    launch(kernel, (2,), x, 3, BLOCK=16)
    assert len(kernel.launched) == 1


def test_tensors_are_not_kept_until_they_are_compiled_for() -> None:
    """Their memory would come on top of a run's peak."""
    x = torch.zeros(64)
    seen = weakref.ref(x)
    with compiled_together(GPU):
        launch(Kernel(), (2,), x)
        del x
        assert seen() is None


def test_kernels_of_other_threads_are_compiled_too() -> None:
    """A GPU's backward passes run on threads of their own."""
    kernel = Kernel()
    with compiled_together(GPU):
        thread = threading.Thread(target=launch, args=(kernel, (1,), 3))
        thread.start()
        thread.join()
    assert len(kernel.compiled) == 1
    assert not kernel.launched


def test_an_error_of_the_compiler_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no such instruction"), compiled_together(GPU):
        launch(Kernel(RuntimeError("no such instruction")), (1,))


def test_an_error_inside_goes_before_one_of_the_compiler() -> None:
    def fail() -> None:
        with compiled_together(GPU):
            launch(Kernel(RuntimeError("no such instruction")), (1,))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()


@pytest.mark.parametrize("device", ["cpu", "planned"])
def test_elsewhere_nothing_changes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    place = torch.device(device) if device == "cpu" else type("Planned", (), {"type": device})()
    with compiled_together(place):
        launch(kernel, (1,), 3)
    assert len(kernel.launched) == 1
    assert not kernel.compiled
