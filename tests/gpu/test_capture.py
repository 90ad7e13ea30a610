"""Captured steps: the bits of eager ones, and a named reason where capture cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.engine.capture import Captured
from paceline.memory.expandable import ask_for_it
from paceline.prepare.assemble import Assembled, assemble
from paceline.recipe import Recipe
from paceline.seams import Build
from paceline.tasks import task_for
from paceline.techniques import precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.driving import recipe

CUDA = torch.device("cuda")


class Net(nn.Module):
    """Dropout, batch normalisation and a frozen layer; ``waits`` looks at a value on the host."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self.one, self.norm, self.drop = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.two, self.three, self.waits = nn.Linear(32, 32), nn.Linear(32, 3), waits
        self.two.requires_grad_(False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.one(pixels.flatten(1))).relu())
        if self.waits and hidden.sum().item() < -1e9:
            hidden = hidden * 2
        return self.three(self.two(hidden).relu())


def made(capture: bool, mode: str = "bf16", waits: bool = False, **optimizer: object) -> tuple[Assembled, Recipe]:
    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        model = Net(waits).to(CUDA)
    chosen = recipe(techniques={"precision": mode, "capture": capture}, optimizer={"decay_all": False, **optimizer})
    layout = ImageLayout(images, generator.integers(0, 3, 64), CUDA, mean=(0.5,), deviation=(0.5,))
    build = Build(
        model=model,
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=layout,
        task=task_for("classification", ("a", "b", "c"), chosen.task),
        device=CUDA,
    )
    return assemble(chosen, precision.apply(build, mode), 50), chosen


def step(run: Assembled, index: int, cut: int = 5) -> tuple[torch.Tensor, ...]:
    """One step of 8 samples in two or three micro-batches of uneven size; every 5th is cut otherwise."""
    ids = (np.arange(8) + 8 * index) % 64
    cuts = (3, 6) if index % 5 == 4 else (cut,)
    done = run.engine.accumulate_batches(
        [run.build.layout.collate(part) for part in np.split(ids, cuts)], 8, step=index
    )
    update = run.engine.update()
    return done.loss, update.norm, update.finite


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_captured_steps_have_the_bits_of_eager_ones(mode: str, kind: str) -> None:
    (eager, _), (captured, _) = made(False, mode, type=kind), made(True, mode, type=kind)
    for index in range(20):
        for one, other in zip(step(eager, index), step(captured, index), strict=True):
            assert torch.equal(one, other), f"step {index}: {one} eager, {other} captured"
    assert captured.engine.execution["steps"].startswith("captured"), captured.engine.execution
    assert eager.engine.execution["steps"].startswith("eager")
    weights = captured.engine.whole()
    assert [name for name, tensor in eager.engine.whole().items() if not torch.equal(tensor, weights[name])] == []


def test_no_captured_step_waits() -> None:
    run, _ = made(True)
    for index in range(12):
        step(run, index)
    with waits_are_errors():
        for index in range(12, 20):
            step(run, index)


def test_a_warm_up_leaves_no_trace() -> None:
    (one, _), (other, _) = made(True), made(True)
    other.engine.warm_up_on(other.build.layout.collate(np.arange(5)), 5)
    for index in range(6):
        assert torch.equal(step(one, index)[0], step(other, index)[0])


def test_a_model_that_waits_runs_eagerly_and_the_reason_named() -> None:
    (plain, _), (run, _) = made(False), made(True, waits=True)
    run.engine.warm_up_on(run.build.layout.collate(np.arange(5)), 5)
    for index in range(6):
        assert torch.equal(step(plain, index)[0], step(run, index)[0])
    assert run.engine.execution["steps"] == "eager: the model waits for the device in its forward or backward pass"


def test_without_a_warm_up_a_failing_recording_is_survived() -> None:
    (plain, _), (run, _) = made(False), made(True, waits=True)
    for index in range(8):
        assert torch.equal(step(plain, index)[0], step(run, index)[0]), f"step {index}"
    assert "capture failed" in run.engine.execution["steps"]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_overflow_under_replay_changes_nothing(kind: str) -> None:
    run, _ = made(True, "fp16", type=kind)
    for index in range(6):
        step(run, index)
    tensors, scalars = run.engine.state()
    before = {f"{a}.{b}": t.clone() for a, named in tensors.items() for b, t in named.items() if "norm" not in b}
    layout = run.build.layout
    bad = layout.collate(np.arange(5))
    bad.inputs["pixel_values"].fill_(float("inf"))
    run.engine.accumulate_batches([bad, layout.collate(np.arange(5, 8))], 8, step=6)
    assert not run.engine.update().finite
    tensors, later = run.engine.state()
    after = {f"{a}.{b}": t for a, named in tensors.items() for b, t in named.items()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert later["applied"] == scalars["applied"]


def test_loading_a_state_between_replays_is_seen_by_them() -> None:
    run, _ = made(True)
    for index in range(5):
        step(run, index)
    tensors, scalars = run.engine.state()
    saved = {stem: {name: t.clone() for name, t in named.items()} for stem, named in tensors.items()}
    expected = [step(run, index)[0].item() for index in range(5, 9)]
    run.engine.load(saved, scalars)
    assert [step(run, index)[0].item() for index in range(5, 9)] == expected


def test_an_input_that_the_step_changes_is_read_anew() -> None:
    runner = Captured(CUDA)
    given = torch.ones(4, device=CUDA)

    def doubled(values: torch.Tensor) -> torch.Tensor:
        return values.mul_(2).sum()

    found = [runner.run(doubled, (given.clone(),)).item() for _ in range(2)]
    for _ in range(3):
        found.append(runner.run(doubled, (given,)).item())
    assert found == [8.0] * 5, "the captured step read its own result"
    assert runner.execution.startswith("captured"), runner.execution


def test_eager_and_captured_calls_share_their_memory() -> None:
    runner = Captured(CUDA)

    def work(values: torch.Tensor) -> torch.Tensor:
        return (values.repeat(256) + 1).sum()  # twice 64 MiB beside each other

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for size in range(2**16, 2**16 - 5, -1):
        given = torch.ones(size, device=CUDA)
        assert [runner.run(work, (given,)).item() for _ in range(3)] == [512.0 * size] * 3
    assert runner.execution == "captured: 5 graphs"
    grown = (torch.cuda.max_memory_reserved() - before) / 2**20
    assert grown < 192, f"{grown:.0f} MiB for work that takes 128"


@pytest.mark.parametrize(
    ("case", "waited"),
    [
        ("smaller", [False, False]),
        ("larger", [True, False]),
        ("smaller, on a full GPU", [True, True]),
        ("smaller, captured on an idle GPU", [False, True]),
    ],
)
def test_a_shape_runs_eagerly_and_is_captured_beside_what_the_gpu_still_does_where_memory_suffices(
    case: str, waited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # what other tests took would fill the GPU
    runner = Captured(CUDA, idle="idle" in case)

    def work(values: torch.Tensor) -> torch.Tensor:
        return (values * 2).sum()

    known, given = torch.ones(2**20, device=CUDA), torch.ones(2 ** (21 if case == "larger" else 19), device=CUDA)
    assert [runner.run(work, (known,)).item() for _ in range(3)] == [2.0 * len(known)] * 3
    if "full" in case:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**30))
    found, has_waited = [], []
    for _ in ("eager", "captured"):
        done = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)  # about half a second
        done.record()
        found.append(runner.run(work, (given,)))
        has_waited.append(done.query())
        torch.cuda.synchronize()
    assert torch.stack(found).tolist() == [2.0 * len(given)] * 2
    assert runner.execution == "captured: 2 graphs"
    assert has_waited == waited, "whether the launch, and the capture, waited for the GPU"


def test_replays_that_the_gpu_has_still_to_do_draw_their_own_numbers_when_a_shape_is_captured() -> None:
    runner, generator = Captured(CUDA), torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_state()

    def work(values: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(200_000_000)  # between what sets the seed and what reads it
        return torch.nn.functional.dropout(values, 0.5).sum()

    def drawn(values: torch.Tensor, seed: int) -> torch.Tensor:
        generator.manual_seed(seed)
        found: torch.Tensor = runner.run(work, (values,))
        return found

    known, given = torch.rand(2**20, device=CUDA), torch.rand(2**19, device=CUDA)
    eager = drawn(known, 1).item()
    assert [drawn(known, 1).item(), drawn(known, 1).item()] == [eager] * 2
    drawn(given, 2)
    torch.cuda.synchronize()
    queued = [drawn(known, 1) for _ in range(4)]
    drawn(given, 3)  # captured meanwhile
    assert torch.stack(queued).tolist() == [eager] * 4
    assert runner.execution == "captured: 2 graphs"
    generator.set_state(before)


def test_what_a_launch_leaves_in_the_pool_is_not_overwritten_by_earlier_graphs() -> None:
    runner = Captured(CUDA)
    kept: dict[int, torch.Tensor] = {}

    def work(values: torch.Tensor) -> torch.Tensor:
        size = len(values)
        if size not in kept:  # like a model's table of positions, made at the first length that needs it
            kept[size] = torch.full((2**22,), 1.0 / size, device=CUDA)
        return values.repeat(2**12).sum() * 0 + kept[size].sum()

    # the second call of a size records, and the third replays: after it, another size leaves something in the pool
    for size in (1024, 1024, 1024, 1025, 1024, 1025, 1025, 1024, 1026, 1024, 1026, 1026, 1024, 1025):
        found = runner.run(work, (torch.ones(size, device=CUDA),)).item()
        assert found == pytest.approx(2**22 / size, rel=1e-5), f"{size}: a graph wrote over what was kept"
    assert runner.execution == "captured: 3 graphs"


def test_a_gradient_that_a_user_took_away_is_named() -> None:
    from paceline.contract.errors import UserError

    run, _ = made(True)
    for index in range(5):
        step(run, index)
    run.build.model.zero_grad(set_to_none=True)
    with pytest.raises(UserError, match="no longer the engine's"):
        step(run, 5)


def test_recordings_that_are_all_dropped_can_be_made_again() -> None:
    runner = Captured(CUDA)
    given = torch.ones(4, device=CUDA)

    def work(values: torch.Tensor) -> torch.Tensor:
        return (values * 2).sum()

    for _ in range(3):
        assert [runner.run(work, (given,)).item() for _ in range(3)] == [8.0] * 3
        assert runner.execution == "captured: 1 graph"
        torch.zeros(8, pin_memory=True)  # the host's allocator looks at its pools
        runner.close()


def test_a_captured_vision_transformer_attends_as_an_eager_one() -> None:
    """Its attention takes the same kernel: the same losses, and no more memory.

    Not the same bits: gradients of queries are added up atomically in FlashAttention's backward pass, so that a second
    eager run would differ too.
    """
    from transformers import ViTConfig, ViTForImageClassification

    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (64, 64, 64, 3), dtype=np.uint8))
    labels, peaks, losses = generator.integers(0, 3, 64), [], []
    for captured in (False, True):
        torch.manual_seed(0)
        config = ViTConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, image_size=64, patch_size=4)
        config.num_labels = 3
        model = ViTForImageClassification(config).to(CUDA)
        chosen = recipe(techniques={"precision": "bf16", "capture": captured})
        build = Build(
            model=model,
            forward=lambda m, b: m(b.inputs["pixel_values"]).logits,
            layout=ImageLayout(images, labels, CUDA, mean=(0.5,) * 3, deviation=(0.5,) * 3),
            task=task_for("classification", ("a", "b", "c"), chosen.task),
            device=CUDA,
        )
        run = assemble(chosen, precision.apply(build, "bf16"), 50)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.append([step(run, index)[0].item() for index in range(4)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert run.engine.execution["steps"].startswith("captured" if captured else "eager")
        run.engine.close()
        del run, build, model
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    # cuBLAS and cuBLASLt have workspaces of their own for the stream that is captured
    more = peaks[1] - 2 * 32 * 2**20 - peaks[0]
    assert more < 0.05 * peaks[0], f"captured steps take {more / 2**20:.1f} MiB more than eager ones"


def test_closing_gives_back_what_the_pool_has_cached_and_recording_goes_on() -> None:
    """``loop.on_oom: split`` begins anew so: what had not fitted stayed in the pool, and evaluations had no room."""
    runner = Captured(CUDA)
    runner.run_eagerly(lambda: torch.ones(2**28, device=CUDA).sum())  # 1 GiB, freed at once
    x = torch.ones(8, device=CUDA)

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    for _ in range(3):
        runner.run(doubled, (x,))
    assert runner.execution == "captured: 1 graph"
    before = torch.cuda.memory_reserved()
    runner.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 2**30
    for _ in range(3):
        assert torch.equal(runner.run(doubled, (x,)), 2 * x)
    assert runner.execution == "captured: 1 graph"
    runner.close()


def test_what_is_captured_is_differentiated_in_the_thread_that_launched() -> None:
    """cuDNN looks for kernels once a thread, which it must not do while a graph is captured."""
    runner, weight, threads = Captured(CUDA), torch.ones(4, device=CUDA, requires_grad=True), []

    def function(given: torch.Tensor) -> torch.Tensor:
        product = weight * given
        product.register_hook(lambda _: threads.append(threading.get_ident()))
        return torch.autograd.grad(product.sum(), weight)[0]

    given = torch.full((4,), 3.0, device=CUDA)
    for _ in range(3):
        assert torch.equal(runner.run(function, [given]), given)
    assert runner.replays
    assert threads == [threading.get_ident()] * 2, "eager once, captured once"
    runner.close()


def test_what_would_be_compiled_while_it_is_captured_runs_eagerly_once_more() -> None:
    chosen = {"double": False}

    @torch.compile(fullgraph=True)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if chosen["double"] else x + 1

    runner, x = Captured(CUDA), torch.arange(64.0, device=CUDA)
    assert torch.equal(runner.run(scaled, (x,)), x + 1)
    chosen["double"] = True  # the second call would be captured
    for _ in range(3):
        assert torch.equal(runner.run(scaled, (x,)), x * 2)
    assert runner.execution == "captured: 1 graph"


IN_FLIGHT = """
import gc, torch
from paceline.engine.capture import Captured

captured, x = Captured(torch.device("cuda")), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64

def work(start):
    for _ in range(40):
        start = start @ x
    return start.float().sum()

for _ in range(4):
    captured.run(work, (x,))
torch.cuda.synchronize()
assert captured.replays
for _ in range(10):
    found = captured.run(work, (x,))
captured.close()
gc.collect()
torch.cuda.empty_cache()
torch.cuda.synchronize()
assert found.isfinite()
"""


def test_what_replays_under_way_read_is_there_until_they_are_done() -> None:
    """In a process of its own: after an illegal access none can go on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ask_for_it(environment)
    done = subprocess.run([sys.executable, "-c", IN_FLIGHT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
