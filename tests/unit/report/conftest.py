"""The same short run as the observers' tests."""

from tests.unit.observe.conftest import records

__all__ = ["records"]
