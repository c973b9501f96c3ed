"""Peers that are libraries: this runs in the peer's own environment, takes orders on standard input, one JSON object a
line, and answers likewise. It imports nothing of Isthmus. Nothing but the library is between the workload and it.

    {"run": "W1", "seed": 1000} -> figures      {"logprobs": [ids]} -> [numbers]
"""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from workloads import WORKLOADS


def make(engine: str, model: str) -> Any:
    if engine == "openvino":
        from with_openvino import OpenVino
        return OpenVino(model)
    if engine == "llama":
        from with_llama import Scorer
        return Scorer(model)
    if engine == "mlx":
        from with_mlx import Mlx
        return Mlx(model)
    import with_transformers
    return {"generate": with_transformers.OneAtATime, "continuous": with_transformers.Continuous}[engine](model)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    began = time.perf_counter()
    engine = make(sys.argv[1], sys.argv[2])
    print(json.dumps({"load_s": time.perf_counter() - began}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "run" in order:
                answer = WORKLOADS[order["run"]](engine.generate, order["seed"])
            elif "generate" in order:
                answer = engine.generate(order["generate"], 8).tokens
            else:
                answer = engine.logprobs(order["logprobs"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # some libraries' threads do not end


if __name__ == "__main__":
    main()
