"""Store and sampler need no torch, and sampled rows leave nothing behind in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.replay.store import TrajectoryStore

ROOT = Path(__file__).parents[3]


def run(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_store_and_sampler_import_no_torch():
    run(
        """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "prefect", "mlflow", "great_expectations", "pandas"]))
import training.replay.prioritized
import training.replay.store
"""
    )


READ_ALL = """
import json, os, sys
from pathlib import Path
import numpy as np
from training.replay.store import TrajectoryStore

def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

view = TrajectoryStore.open(Path(sys.argv[1])).view()
view.batch([0])
before = resident()
for start in range(0, len(view), 64):
    view.batch(np.arange(start, min(start + 64, len(view))))
print(json.dumps(resident() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_reading_every_row_does_not_make_the_store_resident(tmp_path, make):
    generator = np.random.default_rng(0)
    with TrajectoryStore.open(tmp_path / "t", writable=True) as store:
        tokens = generator.integers(0, 50_000, (1_000, 8_000), dtype=np.int32)
        rows = [make(n, response_ids=tokens[n], behavior_log_probs=tokens[n] * -1e-5) for n in range(1_000)]
        store.append(rows)
        size = store.stats().size
    assert size > 60 * 2**20
    assert json.loads(run(READ_ALL, tmp_path / "t")) < size / 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_thousand_trajectories_need_less_than_500_megabytes(tmp_path):
    """Annotated, of 512 tokens each, after a thousand sampled batches and after every row was touched.

    The milliseconds that the benchmark prints beside it are read by people; a test that watches the clock lies.
    """
    told = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.replay", "--trajectories", "50000", "--tokens", "512"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=800, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    resident = {m: int(n) for m, n in re.findall(r"resident after ([\w, ]+): (\d+) MiB", told.stdout)}
    assert set(resident) == {"imports", "open", "1,000 batches", "every row touched"}, told.stdout
    assert max(resident.values()) * 2**20 < 500e6, told.stdout
