"""Humanity's Last Exam: the text-only questions of ``cais/hle``, from the hub or a local folder of parquet files."""

from __future__ import annotations

import errno
import glob
import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import InputError, PrerequisiteError
from autotune.records.load import Message
from autotune.records.trial import WorkloadSpec
from autotune.workloads.base import Question, Source
from autotune.workloads.quiet import quiet

DATASET = "cais/hle"
PAGE = f"https://huggingface.co/datasets/{DATASET}"
SPLIT = "test"
COLUMNS = ("id", "question", "image", "answer", "answer_type", "category")
"""All that is read. The two image columns stay undecoded on disk, and the canary unread."""
LICENCE = "MIT; gated on the hub; must never appear in training data"
BATCH = 16
"""Rows held at once: an ``image`` text can have megabytes."""

EXACT, CHOICE = "exact_match", "multiple_choice"
_REPLY = (
    "Reply in three labelled lines:\n"
    "Explanation: {explanation}\n"
    "{label}: {answer}\n"
    "Confidence: {{how sure you are that it is right, from 0% to 100%}}"
)
SYSTEM_PROMPTS = {
    EXACT: _REPLY.format(
        explanation="{how you arrive at the answer}",
        label="Exact Answer",
        answer="{the final answer alone, short and exact}",
    ),
    CHOICE: _REPLY.format(
        explanation="{why this option is the right one}", label="Answer", answer="{the letter of the option}"
    ),
}
"""By answer type, as the users ask it; own words."""
OFFICIAL_PROMPT = _REPLY.format(
    explanation="{how you arrive at the answer}", label="Answer", answer="{your final answer}"
)
"""One for all questions, as later versions of the official script ask it; own words."""

OTHERWISE = (
    "a local copy: --dataset-path FOLDER; own questions: --workload FILE.jsonl; "
    "lengths alone, without questions: --lengths FILE"
)


def read(spec: WorkloadSpec) -> Source:
    """Read the text-only questions.

    A question is text-only when its ``image`` is null or ``''``. Rows whose id was already seen are left out
    and counted. Both spellings of ``answer_type`` are understood.

    Raises:
        PrerequisiteError: the hub is not reachable, or gives no access.
        InputError: the folder holds something else than this data set.
    """
    rows, provenance = _from_folder(spec.path) if spec.path is not None else _from_hub()
    where = str(provenance["source"])
    questions: dict[str, Question] = {}
    total = with_image = repeated = odd_types = 0
    for row in rows:
        total += 1
        if row["image"]:
            with_image += 1
        elif row["id"] in questions:
            repeated += 1
        else:
            kind = _answer_type(row["answer_type"])
            odd_types += kind is None
            questions[row["id"]] = _question(row, kind or EXACT, official=spec.official_prompt)
    if not questions:
        raise InputError(f"{where}: none of its {total} rows is a question without an image", hint=OTHERWISE)
    notes = []
    if repeated:
        notes.append(f"{where}: {repeated} rows repeat an id and are left out")
    if odd_types:
        notes.append(f"{where}: {odd_types} questions of an unknown answer_type are asked for an exact answer")
    counts = {"rows": total, "with_image": with_image, "repeated_ids": repeated}
    return Source(
        questions=tuple(questions.values()),
        provenance={**provenance, **counts, "licence": LICENCE, "split": SPLIT},
        notes=tuple(notes),
    )


def _question(row: dict[str, Any], kind: str, *, official: bool) -> Question:
    system = OFFICIAL_PROMPT if official else SYSTEM_PROMPTS[kind]
    return Question(
        id=row["id"],
        messages=(Message(role="system", content=system), Message(role="user", content=row["question"])),
        category=row["category"] or None,
        answer=None if row["answer"] is None else str(row["answer"]),
        answer_type=kind,
    )


def _answer_type(value: str | None) -> str | None:
    """``exactMatch``, ``exact_match`` -> exact_match; likewise multiple choice; ``None`` for anything else."""
    letters = re.sub(r"[^a-z]", "", (value or "").lower())
    return {"exactmatch": EXACT, "multiplechoice": CHOICE}.get(letters)


def _has_image(value: Any) -> bool:
    """Null and ``''`` are text-only; mirrors keep an undecoded image instead of the data-URI."""
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _rows(dataset: Any, where: str) -> list[dict[str, Any]]:
    """The columns that are read, a batch at a time; of ``image`` only whether there is one is kept.

    Raises:
        InputError: an id or a question is missing.
    """
    import datasets

    if isinstance(dataset.features["image"], datasets.Image):
        dataset = dataset.cast_column("image", datasets.Image(decode=False))
    rows: list[dict[str, Any]] = []
    for batch in dataset.iter(batch_size=BATCH):
        for values in zip(*(batch[name] for name in COLUMNS), strict=True):
            row = dict(zip(COLUMNS, values, strict=True))
            row["image"] = _has_image(row["image"])
            for name in ("id", "question"):
                if not isinstance(row[name], str) or not row[name].strip():
                    raise InputError(f"{where}: row {len(rows)}: {name} must be text that is not empty", hint=OTHERWISE)
            rows.append(row)
    return rows


def _need_columns(dataset: Any, where: str) -> None:
    missing = [name for name in COLUMNS if name not in (dataset.features or {})]
    if missing:
        raise InputError(
            f"{where}: not the data set {DATASET}: without the columns {', '.join(missing)}",
            hint="own questions in another form: --workload FILE.jsonl",
        )


def _from_hub() -> tuple[list[dict[str, Any]], dict[str, str | int]]:
    with quiet():
        import datasets
        from huggingface_hub.errors import HfHubHTTPError

        # The hub's HTTP client changed twice (requests, httpx, httpx2): a broken connection is its base class.
        http_errors = tuple(cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError")
        datasets.disable_progress_bars()
        try:
            dataset = datasets.load_dataset(DATASET, split=SPLIT)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *http_errors) as error:
            raise _no_access(error) from error
        _need_columns(dataset, DATASET)
        found = re.search(r"[0-9a-f]{40}", " ".join(file["filename"] for file in dataset.cache_files))
        revision = found.group() if found else f"fingerprint {dataset._fingerprint}"
        rows = _rows(dataset.select_columns(list(COLUMNS)), DATASET)
    return rows, {"source": DATASET, "revision": revision}


def _no_access(error: Exception) -> PrerequisiteError:
    """What to do about a failed download; the library's own text stays out (it may quote headers)."""
    from huggingface_hub import get_token

    told = str(error).lower()
    if isinstance(error, OSError) and (error.errno == errno.ENOSPC or "disk space" in told):
        why, hint = "no room left on the disk", "free some, or point HF_HOME at a larger disk"
    elif ("gated" in told or re.search(r"\b40[13]\b", told)) and get_token() is None:
        why = "the data set is gated and nobody is logged in here"
        hint = f"accept the terms at {PAGE}, then `hf auth login` or set HF_TOKEN"
    elif "gated" in told or re.search(r"\b40[13]\b", told):
        why = "the data set is gated and the token in use has no access"
        hint = f"accept the terms at {PAGE} with the account that the token belongs to"
    elif "doesn't exist on the hub" in told:
        why, hint = "the hub does not show it to this account", f"log in with one that can open {PAGE}"
    else:
        why = "the hub cannot be reached and there is no whole copy in the local cache"
        hint = f"with a network: accept the terms at {PAGE}, then `hf auth login` or set HF_TOKEN"
    return PrerequisiteError(f"workload hle: {DATASET}: {why} ({type(error).__name__})", hint=f"{hint}; {OTHERWISE}")


def _from_folder(path: str) -> tuple[list[dict[str, Any]], dict[str, str | int]]:
    files = _parquet_files(path)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    with quiet(), tempfile.TemporaryDirectory() as cache:
        import datasets

        # Streamed, so that nothing is copied, not even into a cache. A file name is a pattern to the library.
        streamed = {
            "data_files": {SPLIT: [glob.escape(str(file)) for file in files]},
            "split": SPLIT,
            "streaming": True,
            "cache_dir": cache,
        }

        try:
            _need_columns(datasets.load_dataset("parquet", **streamed), path)
            rows = _rows(datasets.load_dataset("parquet", **streamed, columns=list(COLUMNS)), path)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"{path}: cannot be read as parquet ({type(error).__name__})", hint=f"download it again from {PAGE}"
            ) from error
    return rows, {"source": path, "revision": f"sha256:{digest.hexdigest()[:16]}"}


def _parquet_files(path: str) -> list[Path]:
    """The file, or those of the folder: of the split ``test`` where names tell splits apart.

    Raises:
        InputError: there is none, or one that is no parquet file.
    """
    root = Path(path).absolute()
    try:
        files = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
        files = [file for file in files if file.name.startswith(SPLIT)] or files
        if not files:
            missing = "there is no such folder" if not root.exists() else "there is no parquet file in it"
            raise InputError(f"{path}: {missing}", hint=f"--dataset-path is a folder with the parquet files of {PAGE}")
        for file in files:
            with file.open("rb") as content:
                if content.read(4) != b"PAR1":
                    raise InputError(
                        f"{file}: not a parquet file",
                        hint="a Git LFS pointer of a few lines? `git lfs pull` in the folder brings the data",
                    )
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}", hint="--dataset-path FOLDER") from error
    return files
