"""Figures of the replay side: resident memory of the trajectory store, milliseconds a batch.

    python -m tests.benchmarks.replay [--trajectories 50000] [--tokens 512] [--batch 64]

`tokens` is the length of a trajectory, a quarter of it prompt. The store is written by one child process and read by
another, so that the memory figure is the reader's alone: after opening, after 1,000 sampled batches, and after touching
every row.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from training.replay.annotation import AnnotationDigests
from training.replay.prioritized import PrioritizedSampler
from training.replay.store import TrajectoryStore
from training.replay.trajectory import SamplingSettings, Trajectory

APPEND = 5_000
DIGESTS = AnnotationDigests(ref_log_probs="reference", score="student")


def write(path: Path, trajectories: int, tokens: int) -> None:
    """Fill a store: every row recorded, annotated with reference log-probs and a score."""
    generator = np.random.default_rng(0)
    prompt, response = tokens // 4, tokens - tokens // 4
    started = time.perf_counter()
    with TrajectoryStore.open(path, writable=True) as store:
        night = store.begin_night("night-1")
        for start in range(0, trajectories, APPEND):
            rows = [
                Trajectory(
                    prompt_id=f"prompt-{number // 5}",
                    prompt_ids=generator.integers(0, 50_000, prompt, dtype=np.int32),
                    response_ids=generator.integers(0, 50_000, response, dtype=np.int32),
                    policy_version="policy",
                    created_night=night,
                    eos=True,
                    behavior_log_probs=-generator.random(response, dtype=np.float32),
                    sampling=SamplingSettings(),
                )
                for number in range(start, min(start + APPEND, trajectories))
            ]
            ids = store.append(rows)
            store.annotate("reference", "ref_log_probs", {i: -generator.random(response) for i in ids})
            store.annotate("student", "score", {i: generator.normal() for i in ids})
        written = time.perf_counter() - started
        started = time.perf_counter()
        report = store.evict(capacity=trajectories - trajectories // 50)
        evicted = time.perf_counter() - started
        stats = store.stats()
    print(f"write: {written:.1f} s for {trajectories} trajectories, {stats.size / 2**20:.0f} MiB on disk")
    print(f"evict {report.over_capacity} oldest and rewrite what that touches: {evicted:.2f} s")


def read(path: Path, batch: int) -> None:
    """Open, draw by priority, read."""
    process = psutil.Process()
    say_memory(process, "imports")
    started = time.perf_counter()
    store = TrajectoryStore.open(path)
    view = store.view(annotations=DIGESTS)
    view.require_annotated()
    print(f"open, verify sha256, index: {time.perf_counter() - started:.2f} s, {len(view)} trajectories")
    say_memory(process, "open")
    sampler = PrioritizedSampler(len(view), beta_steps=1_000, eps=1e-3, seed=0)
    generator = np.random.default_rng(1)
    sampler.add(len(view))
    sampler.update(np.arange(len(view)), generator.normal(size=len(view)))
    draws = [sampler.sample(batch)[0] for _ in range(1_000)]
    cursor = iter(draws)
    say_milliseconds(f"store: batch of {batch}", lambda: view.batch(next(cursor)), 1_000)
    say_memory(process, "1,000 batches")
    for start in range(0, len(view), batch):
        view.batch(np.arange(start, min(start + batch, len(view))))
    say_memory(process, "every row touched")
    indices = draws[0]
    errors = generator.normal(size=batch)
    say_milliseconds(f"sampler: sample {batch}", lambda: sampler.sample(batch), 1_000)
    say_milliseconds(
        f"sampler: update {batch}, then sample", lambda: (sampler.update(indices, errors), sampler.sample(batch)), 1_000
    )
    say_milliseconds(f"sampler: add {batch} over the oldest", lambda: sampler.add(batch), 1_000)
    factors = np.ones(len(view))
    say_milliseconds(f"sampler: sample {batch} under a filter", lambda: sampler.sample(batch, factors), 1_000)


def say_memory(process: psutil.Process, moment: str) -> None:
    """Resident memory, and the part of it that the kernel could not simply drop (not file-backed)."""
    memory = process.memory_info()
    anonymous = memory.rss - memory.shared
    print(f"resident after {moment}: {memory.rss / 2**20:.0f} MiB, of it not file-backed {anonymous / 2**20:.0f} MiB")


def say_milliseconds(what: str, act: Callable[[], object], times: int) -> None:
    """Median and 99th percentile."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        act()
        taken.append((time.perf_counter() - started) * 1e3)
    print(f"{what}: median {np.median(taken):.3f} ms, 99 % {np.percentile(taken, 99):.3f} ms")


def main() -> None:
    """Run writer and reader as children."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--child", choices=["write", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "write":
        write(options.path, options.trajectories, options.tokens)
    elif options.child == "read":
        read(options.path, options.batch)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for child in ("write", "read"):
                command = [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.replay",
                    "--child",
                    child,
                    "--path",
                    f"{folder}/store",
                ]
                sizes = ["--trajectories", str(options.trajectories), "--tokens", str(options.tokens)]
                subprocess.run([*command, *sizes, "--batch", str(options.batch)], check=True, env=os.environ)


if __name__ == "__main__":
    main()
