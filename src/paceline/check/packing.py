"""Packed rows compute what padded batches do."""

from __future__ import annotations

import numpy as np
import torch

from paceline.check.claim import NotApplicable
from paceline.check.difference import Computed, Measured, same_up_to_rounding
from paceline.check.plain import plain_logits
from paceline.check.subject import Subject
from paceline.compare import CHECKED_SAMPLES, Results, exactly, results, spread, trial_of
from paceline.contract.errors import UserError, in_a_line
from paceline.engine.layouts import packed_layout
from paceline.seams import Batch
from paceline.techniques import packing


def check(subject: Subject) -> str:
    """Logits and gradients of a packed row beside those of padded batches, and of each text alone."""
    tokens = subject.require_texts()
    if subject.recipe.techniques.packing is False and not subject.was_chosen("techniques.packing"):
        raise NotApplicable("techniques.packing = false")
    if tokens.windows is not None:
        raise NotApplicable("a sample is several windows, which are compared as they are packed before the run")
    reason = packing.unsupported(subject.pristine)
    if reason is not None:
        raise NotApplicable(f"{reason}; its batches are padded")
    _, build = subject.build(*subject.calm, "techniques.packing=false")
    with exactly(build.device):
        layout = packed_layout(
            subject.recipe,
            build.model,
            subject.dataset,
            build.device,
            first_position=packing.first_position(build.model),
        )
        # two at least: alone in its row, a text has no neighbour to mix with. And in no order: a row has its longest in
        # front, and of samples by length that is the reverse, which undoes itself
        ids = np.resize(spread(layout, subject.train), max(2, min(CHECKED_SAMPLES, len(subject.train))))
        ids = np.random.default_rng(0).permutation(ids)
        padded, row = build.layout.collate(ids), layout.collate(ids)

        def compute(double: bool) -> Computed:
            trial = trial_of(build.model)
            trial = trial.double() if double else trial
            expected = results(trial, build.forward, build.task, padded)
            forward = packing.apply_packing(trial)
            return _named(expected), _named(results(trial, forward, build.task, row))

        _tried(compute)
        away = same_up_to_rounding(compute, "packed and padded")
        same_up_to_rounding(lambda double: _beside_alone(subject, row, ids, double), "packed and alone")
    return f"{len(ids)} texts in a row; logits and gradients differ by {away:.1e} of their norm at most"


def _tried(compute: object) -> None:
    """Raises:
    NotApplicable: the model's attention takes no packed row; a run pads its batches then.
    """
    try:
        compute(False)  # type: ignore[operator]
    except torch.OutOfMemoryError:
        raise
    except UserError as error:
        raise NotApplicable(f"{error.what}; its batches are padded") from None
    except Exception as error:
        raise NotApplicable(f"a packed row fails with {in_a_line(error)}; its batches are padded") from None


def _beside_alone(subject: Subject, row: Batch, ids: np.ndarray, double: bool) -> Computed:
    trial = subject.model(still=True, double=double).to(row.labels.device)
    with torch.no_grad():
        expected = plain_logits(subject, trial, ids)
        found = packing.apply_packing(trial)(trial, row)
    return {"logits": {"": expected}}, {"logits": {"": found}}


def _named(found: Results) -> Measured:
    return {"logits": {"": found.logits}, "gradient": found.gradients}
