"""CPU seconds of `nightjar validate`: what a person waits for on a quiet machine, whatever else runs on this one.

    python -m tests.benchmarks.validate [--config configs/quickstart.yaml] [--repeats 5]

User and system time of the child process and its own children, imports of Python included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

COMMAND = "from flows.cli import main; main()"


def children_seconds() -> float:
    """User + system CPU seconds of all children waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(config: str) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one call. Raises CalledProcessError where the config is refused."""
    cpu, wall = children_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", COMMAND, "validate", config], check=True, stdout=subprocess.DEVNULL)
    return children_seconds() - cpu, time.perf_counter() - wall


def main() -> None:
    """Print one line a call, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    found = [measure(given.config) for _ in range(given.repeats)]
    for cpu, wall in found:
        print(f"{cpu:6.2f} s CPU {wall:6.2f} s wall")
    print(f"median {statistics.median(cpu for cpu, _ in found):.2f} s CPU")


if __name__ == "__main__":
    main()
