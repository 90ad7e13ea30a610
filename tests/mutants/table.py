"""The faults of faults.toml."""

from __future__ import annotations

import tomllib

from tests.mutants.fault import ROOT, Fault

_TABLE = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text(encoding="utf-8"))

FAULTS = tuple(Fault(**{**given, "name": name, "tests": tuple(given["tests"])}) for name, given in _TABLE.items())
