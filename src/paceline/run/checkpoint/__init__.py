"""Checkpoints: a store of named tensors and JSON on disk, and the comparison that guards a resume.

Import ``paceline.run.checkpoint.store`` and ``paceline.run.checkpoint.compare`` themselves; only the store needs torch.
"""
