"""How long does it take to read, split and tokenise 50,000 reviews, the first time and from the cache?

    python benchmarks/encode_imdb.py --model MODEL_FOLDER --data imdb.jsonl.gz

Each measurement is a process of its own, imports included, and prints one JSON line: seconds, and the peak of resident
memory. The cache is a fresh folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

MEASURED = """
import json, resource, sys, time
started = time.perf_counter()
from pathlib import Path
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from paceline.data.encode import wanted
from paceline.data.prepare import outline
from paceline.recipe.parts import DataPart, TaskPart
model, data, cache = sys.argv[1:]
class Source:
    key = model
    def get(self, texts):
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(f"{model}/tokenizer.json"),
                                       pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")
part = DataPart(source=data, split=None, splits={"validation": 5000, "test": 10000})
dataset = outline(part, TaskPart(), tokenizer=Source(), modality="text", cache=Path(cache)).finish(wanted)
print(json.dumps({
    "seconds": round(time.perf_counter() - started, 2),
    "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    "samples": len(dataset),
    "splits": {name: len(ids) for name, ids in dataset.splits.items()},
    "tokens": int(dataset.inputs.offsets[-1]),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer.json")
    parser.add_argument("--data", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for what in ("first", "cached"):
                command = [sys.executable, "-c", MEASURED, arguments.model, arguments.data, cache]
                done = subprocess.run(command, text=True, capture_output=True, check=True, env=environment)
                print(json.dumps({"what": what, "cpus": os.cpu_count(), **json.loads(done.stdout)}), flush=True)


if __name__ == "__main__":
    main()
