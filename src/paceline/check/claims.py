"""All claims, in the order in which they are tried: what is quick and what others rest on comes first. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.check.claim import Claim
from paceline.contract.errors import UserError, nearest

CLAIMS = (
    Claim(
        name="labels",
        says="labels are numbered as in the checkpoint and in what is saved",
        likely="the head's rows stand in another order than the data's labels",
    ),
    Claim(
        name="loader",
        says="an epoch, and an evaluation, has each sample once, with its own label",
        likely="how batches are cut, or how samples are put into them",
    ),
    Claim(
        name="tokenizer",
        says="tokens are the tokenizer's own, become text again, and what is cut is told",
        likely="the encoding, or a tokenizer with other settings than the model's",
    ),
    Claim(
        name="metrics",
        says="loss and metrics are those of a plain computation, sample by sample",
        likely="how sums are put together over batches",
    ),
    Claim(
        name="evaluation",
        says="an evaluation does not depend on its batch size",
        likely="the model's result for a text depends on the width that its batch is padded to",
        switch="--set loop.evaluation_batch_size=1",
    ),
    Claim(
        name="loop",
        says="steps are those of a plain PyTorch loop: loss, gradients, clipping, rates and updates",
        likely="the loss's denominator, or a technique that changes what the model computes",
        switch="--set techniques.packing=false --set techniques.early_pooling=false --set techniques.fused_qkv=false",
    ),
    Claim(
        name="accumulation",
        says="micro-batches have the gradient of one large batch, also of an epoch's last, smaller one",
        likely="losses are not divided by the labels of the whole batch",
        switch="--set loop.micro_batch_size=null",
    ),
    Claim(
        name="schedule",
        says="the learning rate follows the updates that were applied, and its formula",
        likely="a skipped step uses up a rate",
        switch="--set schedule.type=constant --set schedule.warmup=0",
    ),
    Claim(
        name="repeat",
        says="equal seeds repeat, other seeds do not",
        likely="random numbers that depend on what ran before, or kernels that add in any order",
        switch="--set deterministic=true",
    ),
    Claim(
        name="packing",
        says="packed rows compute what padded batches do",
        likely="positions or attention across texts of a row; auto pads such a model's batches",
        switch="--set techniques.packing=false",
    ),
    Claim(
        name="saved",
        says="the saved model predicts in plain transformers what it predicts here",
        likely="weights or names that are not saved as they were trained",
    ),
    Claim(
        name="resume",
        says="a run that stops and goes on ends as one that never stopped",
        likely="a state that is not saved, or not taken up again",
    ),
    Claim(
        name="compile",
        says="compiled blocks compute what they do as written",
        room="compiled",
        likely="torch.compile",
        switch="--set techniques.compile=false",
    ),
    Claim(
        name="capture",
        says="captured steps compute what eager ones do",
        likely="a tensor that moved after its capture",
        switch="--set techniques.capture=false",
    ),
    Claim(
        name="recompiles",
        says="nothing is compiled anew after the warm-up",
        likely="shapes that come for the first time",
        switch="--set data.pad_to_multiple_of=64, or --set techniques.compile=false",
    ),
    Claim(
        name="waits",
        says="a step never waits for the GPU",
        likely="a model that reads numbers back in its forward pass",
    ),
    Claim(
        name="memory",
        says="the memory that was predicted is the memory that is taken",
        likely="an operator whose workspace is not known",
    ),
    Claim(
        name="ranks",
        says="N ranks have the gradients and metrics of one, also where samples do not divide evenly",
        likely="an all-reduce that counts a sample twice, or not at all",
    ),
    Claim(
        name="strategies",
        says="every strategy that this machine can run has the gradients of one rank",
        likely="how this strategy shares weights or gradients",
        switch="--set parallel.strategy=auto",
    ),
)


def chosen(names: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of these names, in their own order; all of them where no name is given.

    Raises:
        UserError: there is no such claim; names the nearest.
    """
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise UserError(f"--only {name}: no such claim", nearest(name, known), "paceline check --list shows all")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)
