"""The arrows of the house and the owners of the third-party packages, read from the source (ast)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import autotune

ROOT = Path(autotune.__file__).parent

# Who may import whom: a room may import the rooms named here, and itself. Rooms of one line in the design
# do not import each other, except that engines/sim and planning stand on physics.
BASE = {"records", "errors"}
LOW = BASE | {"physics", "spec", "hub", "devices"}
MIDDLE = {"engines", "workloads", "measure", "planning", "apply", "report"}
ALLOWED = {
    "records": set(),
    "errors": {"records"},
    "physics": BASE,
    "spec": BASE,
    "hub": BASE,
    "devices": BASE,
    **dict.fromkeys(MIDDLE, LOW),
    "evaluation": LOW | MIDDLE,
    "search": LOW | MIDDLE | {"evaluation"},
    "executors": LOW | MIDDLE | {"evaluation", "search"},
    "cli": LOW | MIDDLE | {"evaluation", "search", "executors"},
    "testing": BASE | {"engines"},
    "__main__": {"cli"},
    "": set(),
}
ARITHMETIC = {"physics", "measure", "planning", "search", "workloads", "evaluation"}
OWNERS = {
    "optuna": {"search/study", "search/sampler"},
    "aiohttp": {"engines/driver"},
    "uvloop": {"engines/driver"},
    "orjson": {"engines/driver"},
    "httpx": {"engines"},
    "prometheus_client": {"engines/scrape", "report/exporter"},
    "psutil": {"engines/process"},
    "pynvml": {"devices"},
    "datasets": {"workloads"},
    "transformers": {"workloads"},
    "huggingface_hub": {"hub", "workloads/hle"},
    "jinja2": {"workloads/tokens"},
    "openai": {"evaluation"},
    "pandas": {"report"},
    "plotly": {"report"},
    "matplotlib": {"report"},
    "click": {"cli"},
    "rich": {"cli", "report/live"},
    "pydantic": {"spec"},
    "yaml": {"apply"},
    "numpy": ARITHMETIC,
    "scipy": ARITHMETIC,
    "pytest": {"testing"},
}
PURE = {"records", "physics", "measure", "planning", "apply"}
IMPURE_MODULES = {"subprocess", "socket", "asyncio", "threading", "requests", "urllib.request", "time"}
HEAVY = ("optuna", "pandas", "openai", "datasets", "matplotlib", "transformers", "scipy")


def modules() -> list[tuple[str, str, ast.Module]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("").as_posix()
        name = relative.removesuffix("/__init__").removesuffix("__init__")
        room = name.split("/")[0]
        found.append((room, name, ast.parse(path.read_text())))
    return found


def imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.append(node.module or "")
            if node.module == "autotune":
                names += [f"autotune.{alias.name}" for alias in node.names]
    return names


def owned(name: str, owners: set[str]) -> bool:
    return any(name == owner or name.startswith(owner + "/") for owner in owners)


def test_arrows_point_one_way() -> None:
    wrong = []
    for room, name, tree in modules():
        for imported in imports(tree):
            parts = imported.split(".")
            if parts[0] != "autotune" or len(parts) == 1 or parts[1].startswith("__version"):
                continue
            if parts[1] != room and parts[1] not in ALLOWED[room]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_third_party_packages_have_one_owner() -> None:
    stdlib = set(sys.stdlib_module_names)
    wrong = []
    for _, name, tree in modules():
        for imported in imports(tree):
            package = imported.split(".")[0]
            if package in stdlib or package in ("autotune", "__future__"):
                continue
            if package not in OWNERS or not owned(name, OWNERS[package]):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_pure_rooms_touch_nothing() -> None:
    wrong = [
        f"{name} imports {imported}"
        for room, name, tree in modules()
        if room in PURE
        for imported in imports(tree)
        if imported in IMPURE_MODULES or imported.split(".")[0] in IMPURE_MODULES
    ]
    assert not wrong


def test_vllm_is_never_imported() -> None:
    assert not [name for _, name, tree in modules() for i in imports(tree) if i.split(".")[0] in ("vllm", "torch")]


def test_the_hidden_truth_of_the_simulator_is_read_by_tests_only() -> None:
    readers = [
        name
        for _, name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "hidden_truth" and not name.startswith("engines/sim")
    ]
    assert not readers


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from autotune.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert "search" in done.stdout
