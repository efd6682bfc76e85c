"""The flow's side of the registry stays light: no torch and no MLflow until something is asked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
import tasks.promotion, tasks.rollback, tasks.reconcile, tasks.retention, tasks.watching, tasks.tracking, tasks.delivery
import tasks.candidate, tasks.review, tasks.night_page, tasks.reachability, tasks.serving, tasks.run_lease
heavy = {"torch", "transformers", "mlflow", "matplotlib", "pandas", "sqlalchemy"}
print(",".join(sorted(heavy & set(sys.modules))))
"""


def test_importing_costs_neither_torch_nor_mlflow() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
