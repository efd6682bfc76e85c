"""Real processes, really killed: what was committed stays, what was not leaves no trace; one writer, many readers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.replay.store_folder import assert_tidy
from training.errors import StoreError
from training.replay.annotation import AnnotationKey
from training.replay.store import TrajectoryStore

ROOT = Path(__file__).parents[3]
PRELUDE = """
import json, os, shutil, signal, sys, time
from pathlib import Path
from training.replay.store import TrajectoryStore
from training.replay.trajectory import Trajectory

def row(number, night=0):
    tokens = [number] * 50
    return Trajectory(f"p{number}", [number, 1], tokens, policy_version="v", created_night=night, eos=True, score=1.0)
"""
# Forks one process for every place where an act reaches the disk, and kills it exactly there.
KILL_EVERYWHERE = (
    PRELUDE
    + """
template, scratch = Path(sys.argv[1]), Path(sys.argv[2])
acts = {
    "append": lambda store: store.append([row(n) for n in range(10, 20)]),
    "annotate": lambda store: store.annotate("m", "score", {i: 2.0 for i in store.ids}),
    "evict": lambda store: store.evict(capacity=4),
    "begin_night": lambda store: store.begin_night("tuesday"),
    "open": lambda store: None,
}

def run(act, path, point):
    calls = 0
    def deadly(real):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call
    if act != "open":
        store = TrajectoryStore.open(path, writable=True)
    os.fsync, os.replace, os.open = deadly(os.fsync), deadly(os.replace), deadly(os.open)
    Path.unlink = deadly(Path.unlink)
    if act == "open":
        store = TrajectoryStore.open(path, writable=True, tokenizer_digest="tok")
    acts[act](store)

shutil.copytree(template, scratch / "warm")
with TrajectoryStore.open(scratch / "warm", writable=True) as store:  # imports happen once, before the forks
    for act in acts.values():
        act(store)

for act in acts:
    point, killed = 0, True
    while killed:
        point += 1
        path = scratch / f"{act}-{point}"
        shutil.copytree(template, path)
        child = os.fork()
        if child == 0:
            try:
                run(act, path, point)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps([act, point, killed]), flush=True)
"""
)
APPEND_FOR_EVER = (
    PRELUDE
    + """
with TrajectoryStore.open(Path(sys.argv[1]), writable=True) as store:
    night = store.begin_night(sys.argv[2])
    number = int(sys.argv[3])
    print("ready", flush=True)
    while True:
        rows = [row(number + n, night) for n in range(20)]
        ids = store.append(rows)
        store.annotate("m", "score", {i: 3.0 for i in ids})
        number += 20
        print(json.dumps([number, ids]), flush=True)
"""
)
WRITE_AND_EVICT = (
    PRELUDE
    + """
with TrajectoryStore.open(Path(sys.argv[1]), writable=True) as store:
    print("ready", flush=True)
    for number in range(40):
        store.append([row(10 * number + n) for n in range(10)])
        store.evict(capacity=30)
"""
)
HOLD_THE_LOCK = (
    PRELUDE
    + "store = TrajectoryStore.open(Path(sys.argv[1]), writable=True)\nprint('ready', flush=True)\ntime.sleep(600)\n"
)


def start(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def path(scratch):
    return scratch / "trajectories"


def story(store):
    """Everything that a reader can tell of a store."""
    view = store.view()
    return {
        "ids": list(store.ids),
        "scores": {str(key): count for key, count in store.stats().annotations},
        "nights": list(store._index.manifest.nights),
        "tokens": [tokens.tolist() for tokens in view.batch(range(len(view))).response_ids],
    }


def test_killed_at_every_place_where_it_reaches_the_disk(path, scratch, make):
    with TrajectoryStore.open(path, writable=True) as store:
        store.begin_night("monday")
        store.append([make(n) for n in range(6)])
        store.append([make(n) for n in range(6, 8)])
        store.annotate("old", "score", dict.fromkeys(store.ids, 1.0))
        before = story(store)
    process = start(KILL_EVERYWHERE, path, scratch)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    outcomes = [json.loads(line) for line in output.splitlines()]
    after = {}
    for act, point, killed in reversed(outcomes):  # the last point of each act was beyond its end: it ran through
        with TrajectoryStore.open(scratch / f"{act}-{point}", writable=True) as store:
            assert store.recovery is None
            found = story(store)
            if not killed:
                after[act] = found
            assert found in (before, after[act]), (act, point)
            # The store goes on: the act that was interrupted can be done again.
            store.append([make(100)])
            store.begin_night("later")
        assert_tidy(scratch / f"{act}-{point}")
    kills = {act: sum(killed for name, _, killed in outcomes if name == act) for act in after}
    assert kills.keys() == {"append", "annotate", "evict", "begin_night", "open"}
    assert min(kills.values()) >= 4
    assert after["append"]["ids"][:8] == before["ids"]
    assert len(after["append"]["ids"]) == 18
    assert len(after["evict"]["ids"]) == 4
    assert after["annotate"]["scores"][str(AnnotationKey("score", "m"))] == 8


def test_killed_at_any_moment_over_several_nights(path):
    committed, number = [], 0
    for night, (commits, seconds) in enumerate([(1, 0.003), (3, 0.011), (6, 0.03)]):
        process = start(APPEND_FOR_EVER, path, f"night-{night}", number)
        assert process.stdout.readline() == "ready\n"
        lines = [process.stdout.readline() for _ in range(commits)]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
        assert process.wait() == -signal.SIGKILL
        for line in lines:
            if line.endswith("\n"):
                number, ids = json.loads(line)
                committed += ids
        number += 40  # what was under way when it died may be stored, under these numbers, or not
        reader = TrajectoryStore.open(path)
        assert set(committed) <= set(reader.ids)
        assert set(committed).isdisjoint(reader.missing("m", "score"))
        with TrajectoryStore.open(path, writable=True) as store:
            store.begin_night(f"morning-{night}")
            assert store.ids == reader.ids
            assert all(len(tokens) == 50 for tokens in store.view().batch(range(len(store))).response_ids)
        assert_tidy(path)
    assert len(committed) >= 20 * 10


def test_files_that_no_manifest_names_do_not_count_and_go(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        ids = store.append([make(0)])
    content = next((path / "segments").iterdir()).read_bytes()
    for name in ("00000009-0000-trajectories.arrow", ".00000009-0001-score.arrow.tmp"):
        (path / "segments" / name).write_bytes(content[: len(content) // 2])
    (path / ".manifest-00000009.json.77.tmp").write_text('{"body": {')
    reader = TrajectoryStore.open(path)
    assert reader.ids == tuple(ids)
    assert len(list((path / "segments").iterdir())) == 3
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.ids == tuple(ids)
        assert store.recovery is None
    assert_tidy(path)


def test_one_writer_at_a_time_and_a_dead_one_holds_nothing(path, make):
    path.mkdir()
    (path / "writer.lock").write_text("9" * 20)
    process = start(HOLD_THE_LOCK, path)
    try:
        assert process.stdout.readline() == "ready\n"
        for act in (lambda: TrajectoryStore.open(path, writable=True), lambda: TrajectoryStore.repair(path)):
            with pytest.raises(StoreError, match=f"process {process.pid} is writing"):
                act()
        assert len(TrajectoryStore.open(path)) == 0
    finally:
        process.kill()
        process.communicate()
    with TrajectoryStore.open(path, writable=True) as store:
        store.append([make(0)])
        with pytest.raises(StoreError, match=f"process {os.getpid()} is writing"):
            TrajectoryStore.open(path, writable=True)
    TrajectoryStore.open(path, writable=True).close()


def test_readers_read_while_a_writer_writes_and_evicts(path):
    process = start(WRITE_AND_EVICT, path)
    assert process.stdout.readline() == "ready\n"
    generations, reader = [], TrajectoryStore.open(path)
    while process.poll() is None:
        fresh = TrajectoryStore.open(path)
        reader.refresh()
        for store in (fresh, reader):
            view = store.view()
            for place, tokens in enumerate(view.batch(range(len(view))).response_ids):
                assert view.prompt_id[place] == f"p{tokens[0]}"
            assert len(view) <= 40
        generations.append(reader.stats().generation)
    assert process.wait() == 0
    assert generations == sorted(generations)
    assert len(set(generations)) > 3
    assert len(TrajectoryStore.open(path)) == 30
