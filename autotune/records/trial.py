"""A trial is one call from record to record: ``run_trial(TrialTask) -> TrialResult``, both JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from autotune.records.lengths import Lengths
from autotune.records.measurement import Measurement
from autotune.records.observation import Capacity, Failure
from autotune.records.settings import Settings

TrialState = Literal["COMPLETE", "PRUNED", "FAIL"]
"""Optuna's words: PRUNED = the configuration failed (data), FAIL = no verdict on it (our fault, invalid)."""

TrialKind = Literal["baseline", "search", "confirm", "measure", "probe"]
"""``probe``: only the lengths of answers are found out."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How to get a server."""

    kind: Literal["vllm", "sim", "attached"]
    model: str
    """Hub name or folder."""
    vllm_command: str = "vllm serve"
    """Command line template with ``{args} {host} {port} {name} {devices}``; without any, arguments are appended."""
    fixed: Settings = field(default_factory=Settings)
    """Flags that every candidate gets (``load_format``, ``trust_remote_code``)."""
    devices: tuple[int, ...] | None = None
    """GPU indices that the server may see; ``None``: as the environment says."""
    silence_limit_s: float = 600.0
    """A start fails after so many seconds without a new line of log."""
    start_limit_s: float = 3600.0
    """A start fails after so many seconds, whatever the log says."""
    stop_grace_s: float = 20.0
    """Between SIGTERM and SIGKILL."""
    base_url: str | None = None
    """A server that is not ours (kind ``attached``)."""
    gpus: str | None = None
    """Hardware in words, ``8xH200`` (kind ``sim``; elsewhere for the record)."""
    seed: int = 0
    """World of the simulator (kind ``sim``), as are the following."""
    tilt: Mapping[str, float] = field(default_factory=dict)
    """Factors on the speed of servers by their flags: ``tensor_parallel_size=8`` -> 0.7."""
    real_time: float = 0.0
    """Real seconds that a virtual one takes."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """Which questions, and how they are asked."""

    name: Literal["hle", "jsonl", "synthetic"]
    path: str | None = None
    """File or folder of the data (``jsonl``; ``hle`` from a local folder); ``-`` is stdin."""
    max_tokens: int = 14336
    """Output limit of the run."""
    limit: int | None = None
    """Use at most so many questions: a seeded, stratified sample."""
    seed: int = 0
    official_prompt: bool = False
    """``hle``: one system prompt for all questions instead of two by answer type."""
    sampling: Mapping[str, float] | None = None
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    mean_prompt_tokens: int = 300
    """``synthetic`` only, as are the following."""
    mean_output_tokens: int = 1000
    sigma: float = 0.8
    """Lognormal shape of the answers' lengths."""
    requests: int | None = None
    """``synthetic``: how many requests there are; ``None``: 1,000."""
    law: str | None = None
    """``synthetic``: a shipped law of prompts and answers by name, instead of means and sigma."""
    vocab_size: int | None = None
    """``synthetic``: vocabulary of the model, so that no prompt holds an id beyond it; ``None``: at least 10,000."""


@dataclass(frozen=True, kw_only=True)
class MeasureSpec:
    """How each load is measured, and when a setting counts as stable."""

    window_s: float = 20.0
    """Shortest window."""
    window_limit_s: float = 60.0
    """Longest window."""
    settle_limit_s: float = 180.0
    """A load that has not settled after so long is ``not_settled``."""
    interval: float = 0.03
    """The window closes when the half-width of its interval is under this share."""
    stall_s: float = 60.0
    """No token for so long while something runs or waits is a stall."""
    kv_limit: float = 0.95
    preemption_limit: float = 0.02
    """Preemptions per finished answer."""
    failed_limit: float = 0.0
    """Share of failed requests."""
    truncation_limit: float = 1.0
    """Share of answers cut at the output limit."""
    drift_limit: float = 0.10
    """Change of the rate between the halves of the window."""
    max_ttft_s: float | None = None
    """99th percentile of the time to the first token; answers are streamed only where a latency is limited."""
    max_tpot_s: float | None = None
    """99th percentile over answers of the time per output token after the first."""


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """How answers' lengths are found out where nobody knows them: real answers to a sample of the questions."""

    questions: int = 128
    """Seeded, stratified; 64 at least (all of a workload that has fewer); 0: no probe."""
    limit_s: float = 300.0
    """The probe ends after so long; answers still running then count as longer than what they have."""

    def __post_init__(self) -> None:
        if self.questions and self.questions < 64:
            raise ValueError(
                f"a probe needs at least 64 questions to tell lengths, or 0 for none, got {self.questions}"
            )
        if self.limit_s <= 0:
            raise ValueError(f"a probe's time limit must be above 0 seconds, got {self.limit_s}")


@dataclass(frozen=True, kw_only=True)
class ConcurrencyPlan:
    """Which loads are tried inside one server start."""

    values: tuple[int, ...] = ()
    """Exactly these, in order; empty: climb."""
    start: int = 8
    """First step of the climb; each further one doubles, then the gap around the best is halved."""
    limit: int = 1024
    gain: float = 0.03
    """A step that gains less ends the climb."""
    refine: int = 1
    """Loads spent between the best step and its neighbours after the climb."""
    calibrate: bool = False
    """First about 8 and about 64 in flight, where ``values`` are not near them: the speed of small batches cannot
    be told from full ones, and the tail of a run lives there."""


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """Everything that a node needs to run one trial."""

    SCHEMA: ClassVar[str] = "autotune/task/1"

    number: int
    kind: TrialKind
    settings: Settings
    engine: EngineSpec
    workload: WorkloadSpec
    measure: MeasureSpec = MeasureSpec()
    concurrency: ConcurrencyPlan = ConcurrencyPlan()
    folder: str | None = None
    """Attempt folder for server.log and observations; ``None``: a temporary one."""
    label: str | None = None
    """What the trial is in words: ``vLLM defaults``."""
    trial_limit_s: float | None = None
    lengths: Lengths | None = None
    """Of answers and prompts, observed before; with them loads start in their steady state."""
    law: str | None = None
    """A shipped law of the answers' lengths by name, instead of ``lengths``."""
    probe: ProbeSpec | None = None
    """Where lengths are not known: find them out first, inside this start. ``None``: loads start fresh."""
    answers: str | None = None
    """Folder in which the probe's answers are kept; ``None``: they are not."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came of one trial; one line of ``trials.jsonl``."""

    SCHEMA: ClassVar[str] = "autotune/trial/1"

    number: int
    kind: TrialKind
    state: TrialState
    settings: Settings
    loads: tuple[Measurement, ...]
    best: int | None
    """Index in ``loads`` of the best valid, stable, steady load."""
    startup_s: float | None
    total_s: float
    """Start, loads and stop."""
    capacity: Capacity | None
    failure: Failure | None
    argv: tuple[str, ...] = ()
    """Command line of the server, without secrets, host and port."""
    versions: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    started_at: str | None = None
    """UTC, ISO 8601."""
    requests_set_aside: int = 0
    """Prompts that did not fit and were not sent."""
    objective: float | None = None
    """What the study minimises, seconds."""
    resolved: Mapping[str, object] | None = None
    """What the server says of its own configuration (``/server_info``)."""
    lengths: Lengths | None = None
    """What this trial's probe found."""
    step_s: Mapping[str, float] | None = None
    """Step constants of one engine, fitted to the loads: ``t0_s``, ``sequence_s``, ``kv_token_s``,
    ``prefill_token_s``, ``beyond_s``, and ``rms``, the relative error they leave; ``None``: too few loads."""
    notes: tuple[str, ...] = ()
    """What the reader of the result should know."""

    @property
    def measurement(self) -> Measurement | None:
        """The best load, if any."""
        return None if self.best is None else self.loads[self.best]


Execute = Callable[[TrialTask], TrialResult]
"""An executor: runs a task somewhere. Settings that fail are results; it raises only what would stop every trial."""
