"""Studies as files: ``studies/*.toml`` <-> ``StudySpec``: parse, validate, fingerprint.

The sections ``workload``, ``measure`` and ``concurrency`` are the records of the same name; flags of
``vllm serve`` stand under ``fixed`` (every candidate gets them), ``space`` (searched) and ``baselines``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autotune.errors import InputError
from autotune.records.settings import Settings
from autotune.records.trial import ConcurrencyPlan, EngineSpec, MeasureSpec, ProbeSpec, WorkloadSpec


class Knob(BaseModel):
    """Values that one flag may take: ``[64, 128]`` or ``{low = 64, high = 1024, log = true}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    choices: tuple[Any, ...] | None = None
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    log: bool = False

    @model_validator(mode="before")
    @classmethod
    def _list_is_choices(cls, data: Any) -> Any:
        return {"choices": data} if isinstance(data, (list, tuple)) else data

    @model_validator(mode="after")
    def _one_form(self) -> Knob:
        if self.choices is not None:
            if not self.choices or self.low is not None or self.high is not None:
                raise ValueError("a knob is a list of values, or low and high, not both")
            if len({json.dumps(value, sort_keys=True) for value in self.choices}) < len(self.choices):
                raise ValueError(f"a knob lists each value once, got {list(self.choices)}")
        elif self.low is None or self.high is None or self.low >= self.high:
            raise ValueError(f"low must be below high, got low={self.low}, high={self.high}")
        elif self.log and self.low <= 0:
            raise ValueError(f"a log range starts above 0, got low={self.low}")
        elif self.step is not None and self.step <= 0:
            raise ValueError(f"step must be above 0, got {self.step}")
        return self


class Baseline(BaseModel):
    """Settings to beat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    flags: dict[str, Any] = Field(default_factory=dict)
    concurrency: tuple[int, ...] = (32, 100)
    """Loads that it is measured at, inside one start."""

    @field_validator("concurrency")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError(f"concurrency lists numbers of at least 1, got {list(value)}")
        return value


class StudySpec(BaseModel):
    """One study: what is tuned, for which run, within which limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    name: str | None = None
    """Folder under ``studies/``; default ``<model>_<n>x<gpu>_<workload>``."""
    engine: Literal["vllm", "sim", "attached"] = "vllm"
    vllm_command: str = "vllm serve"
    base_url: str | None = None
    gpus: str | None = None
    """Hardware in words (``8xH200``): describes, does not select."""
    devices: tuple[int, ...] | None = None
    """GPU indices that may be used; ``None``: all that are visible."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Knob] = Field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()
    workload: WorkloadSpec = WorkloadSpec(name="hle")
    measure: MeasureSpec = MeasureSpec()
    concurrency: ConcurrencyPlan = ConcurrencyPlan()
    requests: int | None = Field(default=None, ge=1)
    """Questions of the planned run; ``None``: all of the workload."""
    trials: int = Field(default=20, ge=1)
    """Server starts of the search, baselines included."""
    budget_s: float | None = Field(default=None, gt=0)
    """The search ends after so many seconds."""
    trial_limit_s: float | None = Field(default=None, gt=0)
    silence_limit_s: float = Field(default=600.0, gt=0)
    start_limit_s: float = Field(default=3600.0, gt=0)
    objective: Literal["makespan", "throughput"] = "makespan"
    lengths: str | None = None
    """File of observed lengths, or a shipped law by name."""
    probe: ProbeSpec = ProbeSpec()
    """How lengths are found out where they are not known, inside the first start."""
    allow_output_changes: bool = False
    """Also try knobs that can change answers (fp8 KV cache, quantization)."""
    seed: int = 0
    tilt: dict[str, float] = Field(default_factory=dict)
    """Engine ``sim``: factors on the speed of servers by their flags, ``"tensor_parallel_size=8" = 0.7``."""
    real_time: float = Field(default=0.0, ge=0)
    """Engine ``sim``: real seconds that a virtual one takes."""

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("model is a hub name or a folder, got an empty text")
        return value

    @field_validator("fixed", "space")
    @classmethod
    def _flags_are_flags(cls, value: dict[str, Any]) -> dict[str, Any]:
        Settings(dict.fromkeys(value, 1))
        return value

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        both = sorted(set(self.fixed) & set(self.space))
        if both:
            raise ValueError(f"a flag is either fixed or searched, got both for {', '.join(both)}")
        if self.engine == "attached" and not self.base_url:
            raise ValueError("engine = 'attached' needs base_url")
        return self

    @property
    def study_name(self) -> str:
        """``name``, or ``<model>_<gpus>_<workload>`` in lower case."""
        if self.name:
            return self.name
        hardware = self.gpus or ("attached" if self.engine == "attached" else "local")
        return re.sub(r"[^a-z0-9._-]+", "-", f"{Path(self.model).name}_{hardware}_{self.workload.name}".lower())

    @property
    def fingerprint(self) -> str:
        """Changes with what the numbers mean: model, engine, flags, workload, measuring; not with limits."""
        kept = self.model_dump(
            mode="json",
            include={
                "model",
                "engine",
                "gpus",
                "fixed",
                "workload",
                "measure",
                "objective",
                "requests",
                "lengths",
                "base_url",
            },
        )
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]

    def engine_spec(self) -> EngineSpec:
        """The record that goes into every task."""
        return EngineSpec(
            kind=self.engine,
            model=self.model,
            vllm_command=self.vllm_command,
            fixed=Settings(self.fixed),
            devices=self.devices,
            silence_limit_s=self.silence_limit_s,
            start_limit_s=self.start_limit_s,
            base_url=self.base_url,
            gpus=self.gpus,
            seed=self.seed,
            tilt=self.tilt,
            real_time=self.real_time,
        )

    def to_data(self) -> dict[str, Any]:
        """JSON data, defaults included: what is stored in the study folder."""
        return self.model_dump(mode="json")


def parse_study(data: dict[str, Any], *, source: str = "study") -> StudySpec:
    """Validate a study given as plain data.

    Raises:
        InputError: names the place, the rule and the value; hints at the nearest known key.
    """
    for section, cls in (
        ("workload", WorkloadSpec),
        ("measure", MeasureSpec),
        ("concurrency", ConcurrencyPlan),
        ("probe", ProbeSpec),
    ):
        content = data.get(section)
        if isinstance(content, dict):
            _known_keys(content, [field.name for field in fields(cls)], f"{source}: [{section}]")
    _known_keys(data, list(StudySpec.model_fields), source)
    try:
        return StudySpec.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "study"
        given = first.get("input")
        told = "" if isinstance(given, dict) else f", got {given!r}"
        rule = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(
            f"{source}: {place}: {rule}{told}", hint="see `autotune search --help` and studies/*.toml"
        ) from None


def read_study(path: Path) -> StudySpec:
    """Read ``studies/NAME.toml``.

    Raises:
        InputError: the file is missing, is no TOML, or breaks a rule.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read study file {path}: {error.strerror}", hint="studies/ holds examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"study file {path} is no valid TOML: {error}", hint="studies/ holds examples") from None
    return parse_study(data, source=str(path))


def _known_keys(given: dict[str, Any], known: list[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise InputError(f"{where}: unknown key {key!r}", hint=hint)
