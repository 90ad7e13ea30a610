"""Guesses and warnings of the verbs that have no console of their own."""

from __future__ import annotations

import sys


def tell(message: str) -> None:
    """Print a notice on standard error, so that standard output holds the result alone."""
    sys.stderr.write(f"info: {message}\n")
