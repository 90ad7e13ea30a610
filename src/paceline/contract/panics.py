"""Panics of libraries in Rust, which reach Python as errors that no ``except Exception`` catches."""

from __future__ import annotations


def is_failure(error: BaseException) -> bool:
    """Return whether a library has failed: with any Exception, or with a panic; false of a signal, or of an exit.

    pyo3's PanicException is no Exception and cannot be imported, so it is known by its name.
    """
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Return whether Rust has panicked; it has written where on standard error by then."""
    return type(error).__name__ == "PanicException"
