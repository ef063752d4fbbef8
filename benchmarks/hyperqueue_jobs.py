"""HyperQueue's rate on the same jobs, if it is here: Fluster does not depend on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS_VARIABLE = "FLUSTER_PEERS"  # a folder that holds venv-hyperqueue, as `python -m benchmarks --peers` sets it

# In an interpreter of HyperQueue's own. Its client looks once a second whether jobs are done, so each writes when it ends.
_SCRIPT = """
import os, sys, time
from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

python, count = sys.argv[1], int(sys.argv[2])
with LocalCluster() as cluster:
    cluster.start_worker(WorkerConfig(cores=4))
    client = cluster.client()

    def rate(count):
        ends = os.path.abspath("ends")
        open(ends, "w").close()
        started = time.time()
        submitted = []
        for _ in range(count):
            job = Job()
            job.program(["sh", "-c", f"{python} -c pass; date +%s.%N >> {ends}"], stdout=None, stderr=None)
            submitted.append(client.submit(job))
        client.wait_for_jobs(submitted)
        times = [float(line) for line in open(ends)]
        assert len(times) == count, times
        return count / (max(times) - started)

    rate(1)
    print("rate", max(rate(count) for _ in range(3)), flush=True)
"""


def hyperqueue_rate(count: int) -> float | None:
    """Jobs `python -c pass` a second, from the first submit to the end of the last; None, and a word, when it is not here."""
    interpreter = _interpreter()
    if interpreter is None:
        sys.stderr.write(
            "*** NOT COMPARED with HyperQueue, which is not here: `python3 -m venv DIR/venv-hyperqueue`, "
            "`DIR/venv-hyperqueue/bin/pip install hyperqueue`, then --peers DIR ***\n"
        )
        return None
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [interpreter, "-c", _SCRIPT, sys.executable, str(count)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("rate ")]
    if not found:
        raise RuntimeError(f"HyperQueue's run in {interpreter} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return float(found[0])


def _interpreter() -> Path | None:
    """One that has `hyperqueue`: of the folder of peers, or beside the `hq` that is on the PATH."""
    peers, hq = os.environ.get(PEERS_VARIABLE), shutil.which("hq")
    candidates = [Path(peers) / "venv-hyperqueue" / "bin" / "python"] if peers else []
    candidates += [Path(hq).parent / "python"] if hq else []
    return next((each for each in candidates if each.exists()), None)
