"""The first of the tutorials' three ways: each text through the frozen model once, and an SVM on what comes out.

The features are the first token's, after the last block. No settings.
"""

from __future__ import annotations

import numpy
import torch
from job import Texts, best_device, loader, opened, padding, read_job, tell, tell_result
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC


@torch.no_grad()
def features(job, model, tokenizer, texts, device):
    """float32 [texts, width]."""
    size = 2 * job["batch_size"]
    order = [list(range(begin, min(begin + size, len(texts)))) for begin in range(0, len(texts), size)]
    found = []
    for batch in loader(job, texts, padding(tokenizer), order):
        batch.pop("labels")
        hidden = model.base_model(**{name: value.to(device) for name, value in batch.items()}).last_hidden_state
        found.append(hidden[:, 0].float().cpu().numpy())
    return numpy.concatenate(found)


def main():
    tell("imported")
    job, device = read_job(), best_device()
    tokenizer, train, model = opened(job)
    model.to(device).eval()
    heldout = Texts(job["heldout"], tokenizer, job["labels"], job["max_length"])
    tell("model")
    classifier = make_pipeline(StandardScaler(), LinearSVC(random_state=job["seed"], max_iter=5000))
    classifier.fit(features(job, model, tokenizer, train, device), train.labels)
    tell("trained")
    quality = classifier.score(features(job, model, tokenizer, heldout, device), heldout.labels)
    tell("evaluated")
    model.save_pretrained(job["save"])
    numpy.savez(f"{job['save']}/svm.npz", weights=classifier[-1].coef_, bias=classifier[-1].intercept_)
    tell("saved")
    tell_result(job, float(quality), None, None)


if __name__ == "__main__":
    main()
