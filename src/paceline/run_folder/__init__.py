"""The folder of a run: its files by name, one run at a time in it, and the facts that a later reader needs.

::

    runs/imdb-20261120-101500/
      recipe.yaml       resolved; runs again as it is          report.html    one self-contained page
      manifest.json     versions, git, hardware, data, seeds   model/         loads in plain transformers
      metrics.jsonl     one record a line                      checkpoints/   paceline.run.checkpoint.store
      summary.json      the RunRecord                          quarantine.jsonl   rows that were dropped
      preempted         only while a stopped run waits for its resume: one line that says which signal and step

Torch-free: opening a folder costs nothing.
"""

from paceline.run_folder.checks import is_unbegun, require_files, require_writable
from paceline.run_folder.folder import RunFolder
from paceline.run_folder.origin import git_state, versions
from paceline.run_folder.ways import has_checkpoint, named_now, way_on, way_to_more

__all__ = [
    "RunFolder",
    "git_state",
    "has_checkpoint",
    "is_unbegun",
    "named_now",
    "require_files",
    "require_writable",
    "versions",
    "way_on",
    "way_to_more",
]
