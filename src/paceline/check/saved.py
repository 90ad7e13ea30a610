"""The saved model predicts in plain transformers what it predicts here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import NEAR, within
from paceline.check.plain import plain_logits
from paceline.check.subject import PLAIN_SGD, STEADY, Subject
from paceline.check.texts import texts_of
from paceline.engine.evaluate import inference
from paceline.models.heads import head_of
from paceline.models.load import quiet
from paceline.models.saved import load_saved, save_model
from paceline.prepare.preparation import Prepared
from paceline.seams import Ids


def check(subject: Subject) -> str:
    """A model that has made a step, saved, loaded by transformers alone and given the samples by its own tokenizer."""
    _, ids = subject.held_out
    ids = ids[:6]
    with subject.numbers():
        folder, here, stepped = _saved(subject, ids)
        own, told = _loaded(subject, folder)
        own = own.eval().to(subject.device)
        with torch.no_grad():
            there = _logits(subject, own, folder, ids)
    away = within({"logits": here}, {"logits": there}, NEAR, "here and in the loaded model")
    return f"{len(ids)} samples{stepped}, {told}; logits differ by {away:.1e} of their norm at most"


def _saved(subject: Subject, ids: Ids) -> tuple[Path, Mapping[str, Tensor], str]:
    """The folder of the saved model, and its logits before it was saved."""
    prepared, folder, stepped = subject.prepared, subject.folder / "saved", ""
    if subject.recipe.model.train == "features":
        _, build = subject.build(*subject.calm)
        weights = None
    else:
        steps = subject.steps(*subject.calm, PLAIN_SGD, STEADY, still=True)
        build, engine = steps.build, steps.assembled.engine
        engine.accumulate(steps.course.input(steps.course.start, 0))
        engine.update()
        weights, stepped = engine.whole(), " after a step"
    infer = inference(build)
    rows = [infer(build.layout.collate(ids[at : at + 1]))[0].float().clone() for at in range(len(ids))]
    save_model(build.model, prepared.tokenizer, folder, prepared.saved, weights)
    return folder, {f"sample {sample}": row for sample, row in zip(ids.tolist(), rows, strict=True)}, stepped


def _loaded(subject: Subject, folder: Path) -> tuple[nn.Module, str]:
    prepared: Prepared = subject.prepared
    saved, part = prepared.saved, subject.recipe.model
    if saved.factory or saved.base or saved.group_norm or part.trust_remote_code:
        loaded = load_saved(folder, factory=part.factory, trust_remote_code=part.trust_remote_code)
        return loaded.model, "loaded by paceline, which plain transformers does not do for this model"
    head = head_of(subject.dataset.kind)
    with quiet():
        model: nn.Module = head.auto_class(saved.modality).from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = tuple(written["id2label"][str(row)] for row in range(len(written["id2label"])))
    outputs = head.outputs(subject.dataset.label_names)
    if head.rows_are_classes and names != outputs:
        raise Broken(f"config.json names the labels {names}, and the data {outputs}", tensor="labels")
    return model, "loaded by plain transformers"


def _logits(subject: Subject, model: nn.Module, folder: Path, ids: Ids) -> dict[str, Tensor]:
    """What the loaded model makes of the samples: of their texts, where they have some, by the saved tokenizer."""
    try:
        texts, pairs = texts_of(subject)
    except NotApplicable:
        return {f"sample {int(i)}": plain_logits(subject, model, ids[at : at + 1])[0] for at, i in enumerate(ids)}
    from transformers import AutoTokenizer

    tokens = subject.require_texts()
    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = {}
    for at, sample in enumerate(ids.tolist()):
        given = (texts[sample],) if pairs is None else (texts[sample], pairs[sample])
        whole = tokens.lengths[sample] if tokens.whole is None else tokens.whole[sample]
        longest = subject.recipe.data.max_length
        if whole > longest and subject.recipe.data.overflow not in ("head", "tail"):
            found[f"sample {sample}"] = plain_logits(subject, model, ids[at : at + 1])[0]
            continue
        inputs = tokenizer(*given, truncation=True, max_length=longest, return_tensors="pt")
        found[f"sample {sample}"] = model(**inputs.to(subject.device)).logits[0].float()
    return found
