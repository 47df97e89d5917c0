"""A made-up data set with the twelve columns of the real one, written as parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.workloads.quiet import quiet

IMAGES = ("image_preview", "rationale_image")
SUBJECTS = ("Math", "Chemistry", "Humanities/Social Science", "Engineering")
LONGEST = 21_341
CANARY = "made-up-canary-0000"
DATA_URI = "data:image/png;base64," + "QUJD" * 50_000
NOT_AN_IMAGE = {"bytes": b"decoding this fails", "path": None}


def row(number: int, **changes: Any) -> dict[str, Any]:
    """One text-only row."""
    made = {
        "id": f"{number:024x}",
        "question": f"How many beads has a chain of {number} and {number + 1} beads?",
        "image": "",
        "image_preview": None,
        "answer": str(2 * number + 1),
        "answer_type": ("exactMatch", "exact_match", "multipleChoice", "multiple_choice")[number % 4],
        "author_name": "nobody",
        "rationale": "One adds them.",
        "rationale_image": None,
        "raw_subject": "Counting",
        "category": SUBJECTS[number % 3],
        "canary": CANARY,
    }
    return {**made, **changes}


def rows() -> list[dict[str, Any]]:
    """Thirty rows: 26 text-only questions, 3 with an image, 1 that repeats an id."""
    made = [row(number, image=None if number % 5 == 0 else "") for number in range(26)]
    made[7] = row(7, question="x" * LONGEST, category="Engineering")
    with_image = [row(100 + n, image=DATA_URI, image_preview=NOT_AN_IMAGE) for n in range(3)]
    return [*made[:10], *with_image, *made[10:], row(3, question="Again?")]


def write(folder: Path, data: list[dict[str, Any]], *, name: str = "test-00000-of-00001.parquet") -> Path:
    """Write ``folder/data/NAME`` with the features of the real data set in its schema; returns the folder."""
    with quiet():
        import datasets
        import pyarrow as pa
        import pyarrow.parquet as pq

    columns = data[0].keys()
    features = {key: datasets.Image() if key in IMAGES else datasets.Value("string") for key in columns}
    target = folder / "data" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(data, schema=datasets.Features(features).arrow_schema)
    pq.write_table(table, target, row_group_size=8)
    return folder
