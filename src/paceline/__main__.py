"""``python -m paceline``: the command line, for torchrun and other programs that start a module."""

from __future__ import annotations

from paceline.verbs.cli import main

if __name__ == "__main__":
    main()
