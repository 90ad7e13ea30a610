"""A rank of a check: jobs come in as lines of JSON, and answers go out. Started by ``processes``.

python -m paceline.check.rank RANK SIZE INIT
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from paceline.check.several import carried_out
from paceline.contract.child import take_over_output
from paceline.contract.errors import UserError, in_a_line
from paceline.distributed.group import joined
from paceline.engine.numerics import numerics
from paceline.machine.cluster import Place

TIMEOUT_SECONDS = 300.0


def main() -> None:
    """Answer until there are no more jobs."""
    send = take_over_output()
    rank, size, init = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = Place(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        started="environment",
        init_method=init,
    )
    with joined(place, backend="gloo", device=torch.device("cpu"), timeout_seconds=TIMEOUT_SECONDS) as world:
        for line in sys.stdin:
            answer: dict[str, Any]
            try:
                with numerics("fp32", deterministic=False):
                    answer = {"done": carried_out(json.loads(line), world)}
            except UserError as error:
                answer = {"refused": str(error.why or error.what)}
            except Exception as error:
                answer = {"failed": in_a_line(error)}
            send(answer)


if __name__ == "__main__":
    main()
