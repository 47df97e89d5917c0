from __future__ import annotations

import io

from autotune.records.event import Event
from autotune.report.live import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EVENTS = [
    Event(kind="study_started", data={"trials": 3, "kept": 1}),
    Event(kind="trial_started", trial=4, data={"label": None, "settings": "max_num_seqs=8"}),
    Event(kind="server_starting", trial=4, data={"seconds": 12.0}),
    Event(kind="server_ready", trial=4, data={"startup_s": 34.2, "kv_tokens": 46592}),
    Event(kind="load_started", trial=4, data={"concurrency": 64}),
    Event(kind="load_sampled", trial=4, data={"output_tokens_per_s": 1760.0, "kv_usage": 0.81}),
    Event(
        kind="load_ended",
        trial=4,
        data={"concurrency": 64, "outcome": "steady", "output_tokens_per_s": 1760.0, "kv_usage": 0.8},
    ),
    Event(
        kind="trial_ended",
        trial=4,
        data={"state": "COMPLETE", "output_tokens_per_s": 1760.0, "concurrency": 64, "total_s": 90.0},
    ),
    Event(kind="winner_changed", trial=4, data={}),
    Event(kind="trial_started", trial=5, data={"label": "vLLM defaults", "settings": "(vLLM defaults)"}),
    Event(kind="trial_ended", trial=5, data={"state": "PRUNED", "failure": "oom", "total_s": 30.0}),
    Event(kind="note", data={"text": "[bold]not markup[/bold]"}),
    Event(kind="study_ended", data={"why": "all trials were used"}),
]


def shown(stream: io.StringIO) -> str:
    progress = Progress(stream, trials=3)
    for event in EVENTS:
        progress(event)
    progress.close()
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = shown(io.StringIO())
    assert "\x1b" not in text
    lines = text.splitlines()
    assert any("trial 2 of 3 (number 4): max_num_seqs=8" in line for line in lines)
    assert any("ready after 34 s, KV cache 46,592 tokens" in line for line in lines)
    assert any("64 in flight: steady, 1,760 tokens/s, KV 80%" in line for line in lines)
    assert any("PRUNED: oom; best so far trial 4" in line for line in lines)
    assert "starting" not in text
    assert "[bold]not markup[/bold]" in text
    assert lines[-1].endswith("done: all trials were used")


def test_a_status_line_on_a_terminal() -> None:
    text = shown(Terminal())
    assert "starting 0 s" in text
    assert "measuring at 64 in flight: 1,760 tokens/s, KV 81%" in text
