"""What does cuDNN's attention cost where every batch has a width of its own?

    python benchmarks/cudnn_attention.py --out FILE.jsonl

A BERT of 6 layers and 384 units from transformers, 12 texts a pass with a mask, forward and backward; each pass has
another width, of 60 to 511 tokens, the same ones for all. In fp32, and in fp16 and bf16 by autocast, with cuDNN's
attention among torch's choices and without it. Told: milliseconds of a pass, median and mean of 60 after 20 to warm up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

CONFIG = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
TEXTS, WARM_UP, PASSES = 12, 20, 80


def milliseconds(dtype: torch.dtype | None) -> list[float]:
    """Of each pass; None: fp32, no autocast."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **CONFIG)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").cuda().train()
    drawn = torch.Generator().manual_seed(1)
    labels, seconds = torch.zeros(TEXTS, dtype=torch.long, device="cuda"), []
    for width in torch.randint(60, 512, (PASSES,), generator=drawn).tolist():
        ids = torch.randint(5, 30_000, (TEXTS, width), generator=drawn).cuda()
        mask = torch.ones_like(ids)
        mask[::2, width // 2 :] = 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return [1000 * each for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU, and torch sees none")
    torch.backends.cuda.matmul.allow_tf32 = True
    print("| dtype | cuDNN's attention | median, ms | mean, ms | first, ms |\n|---|---|---|---|---|")
    for dtype in (None, torch.float16, torch.bfloat16):
        for is_on in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(is_on)
            first, *others = milliseconds(dtype)
            warm = others[WARM_UP - 1 :]
            record = {
                "dtype": str(dtype),
                "cudnn_attention": is_on,
                "median_ms": statistics.median(warm),
                "mean_ms": statistics.mean(warm),
                "first_ms": first,
                "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(),
            }
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            told = " | ".join(f"{record[name]:.1f}" for name in ("median_ms", "mean_ms", "first_ms"))
            print(f"| {dtype or 'fp32'} | {'on' if is_on else 'off'} | {told} |", flush=True)


if __name__ == "__main__":
    main()
