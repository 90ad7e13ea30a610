"""A short run as records."""

import pytest

from paceline.contract.records import (
    CheckpointRecord,
    Decision,
    EvaluationRecord,
    MemoryPlan,
    MemoryRecord,
    Notice,
    RunRecord,
    RunStarted,
    StepRecord,
)

MIB = 2**20
DECISION = Decision(setting="techniques.precision", value="bf16", reason="this GPU computes in [bold]bf16[/bold]")


class Records:
    """Makes one record of each kind; keywords replace fields."""

    def started(self, **fields):
        return RunStarted(
            **{
                "name": "reviews",
                "folder": "runs/reviews",
                "device": "cpu (2 threads)",
                "recipe": {"observe": {"report": True}},
                "decisions": (DECISION,),
                "num_parameters": 66_955_010,
                "num_trained_parameters": 592_130,
                "samples": {"train": 100, "test": 20},
                "label_names": ("no", "yes"),
                "first_step": 0,
                "total_steps": 20,
                "steps_per_epoch": 10,
                "group_names": ("encoder", "head"),
                **fields,
            }
        )

    def step(self, number, **fields):
        return StepRecord(
            **{
                "step": number,
                "epoch": (number - 1) // 10,
                "loss": 0.5,
                "gradient_norm": 1.5,
                "learning_rates": (5e-5, 1e-3),
                "samples": 8,
                "tokens": 80,
                "slots": 100,
                "correct": 6,
                "counted": 8,
                "skipped": False,
                "seconds": 0.1,
                "peak_bytes": 3 * 2**30,
                **fields,
            }
        )

    def evaluation(self, number=10, **fields):
        return EvaluationRecord(
            **{
                "split": "validation",
                "step": number,
                "epoch": 0,
                "loss": 0.4,
                "metrics": {"accuracy": 0.875},
                "samples": 20,
                "seconds": 1.5,
                "confusion": ((9, 1), (2, 8)),
                "train_metrics": {"accuracy": 0.75},
                **fields,
            }
        )

    def checkpoint(self, number=10):
        return CheckpointRecord(step=number, folder=f"step-{number}", num_bytes=2**20, seconds=0.2, is_best=True)

    def summary(self, **fields):
        return RunRecord(
            **{
                "name": "reviews",
                "folder": "runs/reviews",
                "status": "finished",
                "steps": 20,
                "applied_steps": 19,
                "epochs": 2.0,
                "seconds": {"train": 6.0, "evaluate": 3.0, "other": 1.0, "total": 10.0},
                "samples_per_second": 80.0,
                "tokens_per_second": 800.0,
                "padding_share": 0.2,
                "best_step": 20,
                "evaluations": (self.evaluation(),),
                "final": {"test": {"loss": 0.4, "accuracy": 0.9}},
                "peak_bytes": None,
                "decisions": (DECISION,),
                **fields,
            }
        )

    def plan(self, **fields):
        parts = {"activations": 4000, "optimizer states": 1024, "parameters": 512, "gradients": 512, "rounding": 2}
        return MemoryPlan(
            **{
                "gpu": "NVIDIA H200",
                "capacity": 143_771 * MIB,
                "allocated": 6050 * MIB,
                "reserved": 6200 * MIB,
                "context": 1236 * MIB,
                "parts": {name: size * MIB for name, size in parts.items()},
                "activations": {"linear layers": 3000 * MIB, "attention": 1000 * MIB},
                "moment": "backward",
                "phases": {"forward": 5900 * MIB, "backward": 6050 * MIB},
                "samples": 32,
                "slots": 16_384,
                "num_parameters": 66_955_010,
                "num_trained": 592_130,
                "assumed": ("attention by flash",),
                "execution": {"layout": "packed"},
                "decisions": (DECISION,),
                **fields,
            }
        )

    def memory(self, **fields):
        return MemoryRecord(
            **{"allocated": 6000 * MIB, "reserved": 6500 * MIB, "total": 7800 * MIB, "plan": self.plan(), **fields}
        )

    def run(self, **fields):
        """A whole run in order."""
        yield self.started(**fields)
        for number in range(1, 21):
            yield self.step(number)
            if number % 10 == 0:
                yield self.evaluation(number)
                yield self.checkpoint(number)
        yield Notice(message="guessed", level="warning")
        yield self.summary()


@pytest.fixture
def records():
    return Records()
