"""Who may import whom: held by import-linter's contracts, and by importing for real with the forbidden blocked."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORCHESTRATION = ("prefect", "mlflow", "great_expectations")
_BLOCK = """
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)
"""
TORCH_FREE = [
    "training.contract", "training.errors", "training.recorder", "training.process",
    "training.data.quickstart", "training.data.ingest", "training.evaluation.gate", "training.evaluation.report",
    "training.rewards.functions", "training.models.folder", "training.replay.prioritized", "training.data.look",
]  # fmt: skip


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def import_with_blocked(modules: list[str], blocked: tuple[str, ...]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_LEVEL": "CRITICAL"}
    code = _BLOCK.format(blocked=blocked, modules=modules)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 broken" in done.stdout


def test_training_needs_no_orchestration() -> None:
    import_with_blocked(modules_of("training"), ORCHESTRATION)


def test_flows_need_no_torch() -> None:
    import_with_blocked(modules_of("flows"), ("torch", "transformers", "peft", "deepspeed"))


def test_tasks_need_no_torch_to_be_imported() -> None:
    import_with_blocked(modules_of("tasks"), ("torch", "transformers", "peft", "deepspeed"))


def test_torch_free_parts_of_training_are_torch_free() -> None:
    import_with_blocked(TORCH_FREE, ("torch", "transformers", *ORCHESTRATION))


def test_configs_need_pydantic_and_yaml_alone() -> None:
    import_with_blocked(modules_of("configs"), ("torch", "numpy", "pandas", "pyarrow", *ORCHESTRATION))


def test_validate_and_help_load_nothing_heavy() -> None:
    blocked = ("torch", "transformers", "numpy", "pyarrow", *ORCHESTRATION)
    import_with_blocked(["flows.cli", "flows.validate_command"], blocked)


@pytest.mark.parametrize("package", ["configs", "training", "tasks", "flows"])
def test_nothing_unpickles(package: str) -> None:
    """No pickle, no torch.load without weights_only, no trust_remote_code that is not False."""
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
                assert not names & {"pickle", "cloudpickle", "dill", "shelve"}, where
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                trusted = keywords.get("trust_remote_code")
                assert trusted is None or (isinstance(trusted, ast.Constant) and trusted.value is False), where
                if ast.unparse(node.func) == "torch.load":
                    assert ast.unparse(keywords.get("weights_only", ast.Constant(False))) == "True", where
