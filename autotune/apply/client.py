"""The client's side in words: the best server with the wrong number in flight is slow."""

from __future__ import annotations

import json

from autotune.records.winner import Winner


def client_comments(winner: Winner) -> list[str]:
    """Comment lines (``# ...``) for shell and YAML."""
    client = winner.client
    rate = winner.measurement.output_tokens_per_s
    lines = [f"# {winner.model}: {winner.verdict} of study {winner.study}, trial {winner.trial}"]
    if rate is not None:
        lines.append(f"# measured: {rate:,.0f} output tokens/s with {client.concurrency} requests in flight")
    lines.append(f"# client: keep exactly {client.concurrency} requests in flight, max_tokens={client.max_tokens}")
    if client.sampling:
        lines.append(f"# client: sampling {json.dumps(dict(client.sampling))}")
    else:
        lines.append("# client: send no sampling parameters (the model's generation_config applies)")
    lines.append(f"# client: time limit {client.request_limit_s:.0f} s a request, no retries on a time-out")
    return lines
