"""The plainest way to compute the same: sample by sample, with torch's own losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.check.claim import NotApplicable
from paceline.check.subject import Subject
from paceline.data.dataset import Images, Tokens
from paceline.prepare.assemble import forward_for
from paceline.prepare.labels import weights_of
from paceline.seams import Batch, Ids
from paceline.tasks.plain import plain_task


def plain_logits(subject: Subject, model: nn.Module, ids: Ids) -> Tensor:
    """Logits [S, C] of samples, each passed through the model alone."""
    inputs = subject.dataset.inputs
    if isinstance(inputs, Images):
        return torch.cat([_of_image(subject, model, inputs, int(sample)) for sample in ids])
    return torch.cat([_of_text(subject, model, inputs, int(sample)) for sample in ids])


def plain_loss(subject: Subject, logits: Tensor, ids: Ids) -> Tensor:
    """The mean loss of samples, as torch has it.

    Raises:
        NotApplicable: the loss is another than torch's own.
    """
    part = subject.recipe.task
    if part.own_loss is not None or part.loss == "focal":
        raise NotApplicable(f"task.loss = {part.loss}: torch has no such loss to compare with")
    labels = torch.from_numpy(np.array(subject.dataset.labels[ids])).to(logits.device)
    # balanced ones are counted over the training samples, which are few here
    weights = weights_of(part, subject.dataset)
    weight = torch.tensor(weights, device=logits.device) if weights else None
    return plain_task(subject.dataset.kind).loss(logits.float(), labels, weight, part)


def _called(subject: Subject, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    batch = Batch(
        {name: value.to(device) for name, value in inputs.items()},
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.ones(1, device=device),
    )
    return forward_for(model, device)(model, batch)


def _of_image(subject: Subject, model: nn.Module, images: Images, sample: int) -> Tensor:
    settings = subject.images
    assert settings is not None
    dtype = next(model.parameters()).dtype
    pixels = torch.from_numpy(np.array(images.pixels[sample])).movedim(-1, 0).float() / 255
    mean, std = (torch.tensor(each[: len(pixels)]).view(-1, 1, 1) for each in (settings.mean, settings.std))
    return _called(subject, model, {"pixel_values": ((pixels - mean) / std)[None].to(dtype)})


def _of_text(subject: Subject, model: nn.Module, tokens: Tokens, sample: int) -> Tensor:
    rows = [sample] if tokens.windows is None else range(tokens.windows[sample], tokens.windows[sample + 1])
    found = torch.cat([_called(subject, model, row_inputs(tokens, row)) for row in rows])
    if tokens.windows is None:
        return found
    joined = found.amax(0) if subject.recipe.data.aggregate == "max" else found.mean(0)
    return joined[None]


def row_inputs(tokens: Tokens, row: int) -> dict[str, Tensor]:
    """A sequence alone in its batch, as the tokenizer gives it to the model."""
    start, end = int(tokens.offsets[row]), int(tokens.offsets[row + 1])
    length = end - start
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(tokens.flat[start:end].astype(np.int64))[None],
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
    }
    if tokens.types is not None:
        inputs["token_type_ids"] = torch.from_numpy(tokens.types[start:end].astype(np.int64))[None]
    elif tokens.second is not None:
        inputs["token_type_ids"] = (torch.arange(length) >= int(tokens.second[row])).long()[None]
    elif tokens.typed:
        inputs["token_type_ids"] = torch.zeros(1, length, dtype=torch.int64)
    return inputs
