"""Our driver as a command, so that it can be measured from outside like the others; prints what it saw as JSON.

python -m tests.bench.ours --base-url http://127.0.0.1:8000 --model null --concurrency 256 --dataset d.json --stream
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autotune.engines.driver import Target, drive
from autotune.records.load import LoadPlan, Message, Request
from autotune.testing import never


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument(
        "--dataset", type=Path, required=True, help="As for `vllm bench serve --dataset-name sharegpt`."
    )
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    requests = tuple(
        Request(
            id=str(number),
            messages=(Message(role="user", content=turns["conversations"][0]["value"]),),
            max_tokens=len(turns["conversations"][1]["value"].split()),
            forced=True,
        )
        for number, turns in enumerate(json.loads(given.dataset.read_text()))
    )
    target = Target(base_url=given.base_url, model=given.model, metrics_url=f"{given.base_url}/metrics")
    load = LoadPlan(start=requests[: given.concurrency], refill=requests[given.concurrency :], stream=given.stream)
    seen = drive(target, load, stop=never, alive=lambda: None)
    told = {
        "end": seen.end,
        "failed": sum(request.error is not None for request in seen.requests),
        "output_tokens": sum(request.output_tokens or 0 for request in seen.requests),
        "loop_lag_p99_s": seen.client.loop_lag_p99_s,
        "in_flight": [seen.client.in_flight_min, seen.client.in_flight_max],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
