"""Compiled training passes compute what the plain ones do, and one compilation serves all equal blocks and lengths."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.prepare.assemble import assemble
from paceline.techniques import compile as technique
from paceline.techniques.compile import (
    apply_compile,
    apply_compile_whole,
    embeddings_of,
    forget_largest,
    reason_of,
    undo,
)
from paceline.techniques.fused_qkv import apply_fused_qkv
from paceline.techniques.packing import apply_packing
from paceline.techniques.recompute import apply_recompute
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import STEPS, tiny_model

pytestmark = [
    # torch hides both while it compiles, in a way that turning warnings into errors defeats
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

ROOT = Path(__file__).resolve().parents[2]

WIDTH, LAYERS = 64, 3
TOTALS = (WIDTH, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Lengths of packed rows, from one that is as long as the models are wide."""

FAMILIES = {"distilbert": 1, "bert": 1, "roberta": 1, "electra": 1, "modernbert": 3}
"""Kind -> distinct blocks: ModernBERT's first has no norm, and the others alternate local and global attention."""

EACH_FAMILY = [
    pytest.param(kind, marks=pytest.mark.slow) if kind in ("roberta", "electra") else kind for kind in FAMILIES
]
"""Blocks of RoBERTa and ELECTRA are those of BERT."""


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def made_model(kind: str) -> tuple[nn.Module, list[nn.Module]]:
    """A model of three layers without dropout, and its blocks."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    settings |= {"intermediate_size": 96, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "distilbert":
        settings = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 96}
        settings |= {"dropout": 0.0, "attention_dropout": 0.0}
    if kind == "modernbert":
        settings |= {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
        settings |= {"bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, vocab_size=100, num_labels=2, pad_token_id=0, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").train()
    base = model.base_model
    holder = {"distilbert": "transformer.layer", "modernbert": "layers"}.get(kind, "encoder.layer")
    return model, list(base.get_submodule(holder))


def packed_model(kind: str) -> tuple[nn.Module, list[nn.Module]]:
    """The same for packed rows."""
    model, blocks = made_model(kind)
    apply_packing(model)
    return model, blocks


def packed_loss(model: nn.Module, total: int, sequences: int) -> Tensor:
    """Loss of a made-up packed row of ``total`` positions."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(total)
    ids = torch.randint(5, 100, (1, total), generator=generator).to(device)
    ends = torch.linspace(0, total, sequences + 1).int().to(device)
    place = (torch.arange(total, device=device) % 32)[None] + 2
    out = model.base_model(input_ids=ids, position_ids=place, cu_seq_lens_q=ends, max_length_q=512)
    # not a sum of squares, which a last LayerNorm makes a constant
    return (out.last_hidden_state * torch.randn(1, total, WIDTH, generator=generator).to(device)).sum() / total


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_one_compilation_serves_every_length_and_every_equal_block(kind: str) -> None:
    model, blocks = packed_model(kind)
    of_blocks, of_embeddings = CompileCounterWithBackend("eager"), CompileCounterWithBackend("eager")
    embeddings = embeddings_of(model, blocks)
    assert [type(module).__name__.endswith("Embeddings") for module in embeddings] == [True], embeddings
    apply_compile(blocks, backend=of_blocks)
    apply_compile(embeddings, backend=of_embeddings)
    for index, total in enumerate(TOTALS):
        packed_loss(model, total, sequences=3 + index % 4)
    assert of_blocks.frame_count == FAMILIES[kind], "a length, a number of sequences or a block was compiled for anew"
    assert of_embeddings.frame_count == 1


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_the_plain_pass(recomputed: bool) -> None:
    (plain, _), (compiled, blocks) = packed_model("bert"), packed_model("bert")
    counter = CompileCounterWithBackend("aot_eager")
    assert apply_fused_qkv(compiled) == LAYERS
    if recomputed:
        apply_recompute(blocks)
    apply_compile(blocks, embeddings_of(compiled, blocks), backend=counter)
    for total in (WIDTH, 128):
        losses = [packed_loss(model, total, 4) for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert counter.frame_count == 2, "the block and the embeddings"
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_padded_steps_have_the_losses_of_the_plain_ones() -> None:
    chosen = recipe()
    plain, compiled = tiny_model(dropout=0.0), tiny_model(dropout=0.0)
    blocks = list(compiled.distilbert.transformer.layer)
    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(blocks, embeddings_of(compiled, blocks), backend=counter)
    losses = [train(assembled(model, chosen), chosen, steps=8) for model in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert counter.frame_count == 2, "padded lengths were compiled one by one"


def test_under_autocast_the_products_run_in_bf16() -> None:
    (plain, _), (compiled, blocks) = packed_model("distilbert"), packed_model("distilbert")
    apply_compile(blocks, backend="aot_eager")
    losses = []
    for model in (plain, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(packed_loss(model, 128, 4))
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)
    assert losses[1].item() != packed_loss(packed_model("distilbert")[0], 128, 4).item(), "autocast had no effect"


class Dropping(nn.Module):
    """Its input's gradient shows which values the dropout kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.dropout = nn.Linear(1, 1), nn.Linear(1, 1), nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(hidden * self.linear.weight)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_the_backward_pass_uses_the_dropout_of_the_forward_pass(recomputed: bool) -> None:
    block = Dropping()
    if recomputed:
        apply_recompute([block])
    apply_compile([block], backend="aot_eager")
    hidden = torch.ones(40, 50, requires_grad=True)
    out = block(hidden)
    out.sum().backward()
    assert torch.equal(out == 0, hidden.grad == 0)
    assert 0.4 < (out == 0).float().mean().item() < 0.6
    assert not torch.equal(out == 0, block(hidden) == 0), "the same values are dropped in every pass"


def test_evaluation_runs_as_written() -> None:
    model, blocks = packed_model("distilbert")
    counter = CompileCounterWithBackend("eager")
    apply_compile(blocks, embeddings_of(model, blocks), backend=counter)
    with torch.no_grad():
        packed_loss(model, 64, 2)
    packed_loss(model.eval(), 64, 2)
    assert counter.frame_count == 0
    packed_loss(model.train(), 64, 2)
    assert counter.frame_count == 2


def test_names_hooks_and_other_models_are_left_alone() -> None:
    (model, blocks), (other, _) = packed_model("bert"), packed_model("bert")
    names, calls = list(model.state_dict()), []
    apply_compile(blocks, embeddings_of(model, blocks), backend="eager")
    blocks[1].register_forward_hook(lambda *_: calls.append(1))
    assert list(model.state_dict()) == names
    packed_loss(model, 64, 2)
    assert calls == [1]
    assert undo(other) == 0
    assert undo(model) == LAYERS + 1
    assert all("forward" not in vars(module) for module in model.modules())


def test_undoing_keeps_what_another_technique_put_there() -> None:
    block = Dropping()
    apply_recompute([block])
    kept = block.forward
    apply_compile([block], backend="eager")
    undo(block)
    assert block.forward is kept


def test_a_whole_model_is_compiled_for_its_largest_batch_only() -> None:
    model, counter = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)),
        CompileCounterWithBackend("eager"),
    )
    apply_compile_whole(model, static=True, backend=counter)
    for rows in (16, 5, 16, 3):
        assert model(torch.ones(rows, 1, 8, 8)).shape == (rows, 2)
    assert counter.frame_count == 1, "the tail of an epoch was compiled for"
    model(torch.ones(32, 1, 8, 8))
    assert counter.frame_count == 2, "a larger batch came later and was not compiled for"
    forget_largest(model)
    model(torch.ones(8, 1, 8, 8))
    assert counter.frame_count == 3, "batches were made smaller, and the largest of them was not compiled for"


def test_the_path_says_what_is_compiled() -> None:
    build = assembled(tiny_model(), recipe()).build
    assert technique.apply(build, False).execution["compile"] == "off"
    assert undo(build.model) == 0
    assert technique.apply(build, "auto").execution["compile"] == "each of 2 blocks and the embeddings"
    assert undo(build.model) == 3
    convolutions = replace(build, model=nn.Sequential(nn.Conv2d(3, 4, 3)), blocks=())
    assert technique.apply(convolutions, True).execution["compile"] == "the whole model"


class Breaking(Dropping):
    """Cannot be one graph: it looks at a value."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(hidden) * (2.0 if hidden.sum().item() > 0 else 1.0)


def test_what_cannot_be_compiled_runs_as_written_and_the_reason_is_kept() -> None:
    block = Breaking()
    build = replace(
        assembled(tiny_model(), recipe()).build, model=block, blocks=(block,), execution={"layout": "padded"}
    )
    build = technique.apply(build, "auto")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        block(torch.ones(3, 4))
    with pytest.raises(RecipeError, match="this model cannot be compiled: ") as refused:
        technique.fall_back(technique.apply(build, True), True, caught.value)
    assert "--set techniques.compile=false" in str(refused.value)
    fallen = technique.fall_back(technique.apply(build, "auto"), "auto", caught.value)
    assert fallen.execution["compile"].startswith("off: ")
    assert fallen.execution["layout"] == "padded"
    assert fallen.decisions[-1].setting == "techniques.compile"
    assert fallen.decisions[-1].value == "false"
    assert block(torch.ones(3, 4)).shape == (3, 4), "still compiled"


def test_only_the_compilers_errors_are_reasons() -> None:
    assert reason_of(ValueError("shapes differ")) is None
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = torch._dynamo.exc.Unsupported("call of .item()\n  long explanation")
    assert reason_of(wrapped) == "Unsupported: call of .item()"


def test_the_reason_is_what_the_backend_raised_not_that_it_raised() -> None:
    def backend(*_: object) -> None:
        raise OSError("no space left on device")

    with pytest.raises(Exception, match="raised") as found:
        torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert reason_of(found.value) == "OSError: no space left on device"


KEPT = """
import sys
from pathlib import Path

import torch
from tests.parity.reference import padded, samples, tiny_model
from paceline.engine.compile_cache import kept_cache
from paceline.techniques.compile import apply_compile, embeddings_of
from paceline.techniques.fused_qkv import apply_fused_qkv

inputs = padded(samples()[0][:6])
plain, compiled = tiny_model(dropout=0.0), tiny_model(dropout=0.0)
blocks = list(compiled.distilbert.transformer.layer)
apply_fused_qkv(compiled)
apply_compile(blocks, embeddings_of(compiled, blocks))
with kept_cache(Path(sys.argv[1])):
    logits = [model(**inputs).logits for model in (plain, compiled)]
    for each in logits:
        each.square().sum().backward()
torch.testing.assert_close(logits[1], logits[0])
for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
counted = torch._dynamo.utils.counters["aot_autograd"]
print(*(counted[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")))
"""


@pytest.mark.slow
def test_generated_kernels_agree_and_a_second_run_finds_them_kept(tmp_path: Path) -> None:
    """The whole chain, C++ compiler included; processes of their own, since torch's compilers keep threads running."""
    counted = []
    for _ in range(2):
        command = [sys.executable, "-c", KEPT, str(tmp_path / "kernels")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        counted.append(done.stdout.split()[-3:])
    assert counted == [["0", "2", "0"], ["2", "0", "0"]], "hits, misses and bypasses of the two runs"


@pytest.mark.parametrize("chosen_by_itself", [True, False])
def test_a_run_goes_on_without_where_compiling_was_chosen_by_itself(
    chosen_by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("planted")

    monkeypatch.setattr(technique, "_compiled_call", lambda *_, **__: broken)
    asked, plain = recipe(techniques={"compile": True}), recipe()
    build = assembled(tiny_model(dropout=0.0), asked).build
    if chosen_by_itself:
        build = replace(build, decisions=(Decision(setting="techniques.compile", value="true", reason="it pays"),))
    run = assemble(asked, build, STEPS)
    batch = build.layout.collate(torch.arange(8).numpy())
    if not chosen_by_itself:
        with pytest.raises(RecipeError, match="this model cannot be compiled"):
            run.engine.warm_up_on(batch, 8)
        return
    run.engine.warm_up_on(batch, 8)
    assert run.engine.execution["compile"] == "off: InternalTorchDynamoError: planted"
    losses = train(assembled(tiny_model(dropout=0.0), plain), plain)
    assert train(run, asked) == pytest.approx(losses, rel=1e-5), "not the plain run's"


def test_what_can_no_longer_be_compiled_in_mid_run_goes_on_as_written(caplog: pytest.LogCaptureFixture) -> None:
    """A Python value that is another at every call is compiled for anew, up to torch's limit."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            return hidden * self.calls

    module = Counting()
    apply_compile([module], backend="eager")
    hidden = torch.ones(2, 3, requires_grad=True)
    found = [module(hidden)[0, 0].item() for _ in range(12)]
    assert found == list(range(1, 13))
    assert "Counting is no longer compiled: " in caplog.text
