"""A client that is stopped for longer than the server waits for it: what it waited for comes, and its callers learn of it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from fluster_bus.direct.pulse import SERVER_PINGS
from tests.system.daemons import Daemons
from tests.system.processes import Family

STOPPED_S = 4.0
QUICK_PINGS = 'ping_interval: "500ms"\nping_max: 3\n'
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.25", "FLUSTER_PINGS_UNANSWERED": "2"}
LINES = 30

PROGRAM = """
import json, sys, threading, time
from fluster import Cluster, Entrypoint, JobRequest, deploy
from fluster.errors import ConnectionLostError

class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

def chatter(lines, pause_s):
    for number in range(lines):
        print(number, flush=True)
        time.sleep(pause_s)

stopped_s, lines = float(sys.argv[1]), int(sys.argv[2])
cluster = Cluster()
seen = {}
cluster.asynchronous.bus.on_disconnect(lambda: seen.update(lost=True))

def launch(function, *args):
    return cluster.launch(JobRequest(name=function.__name__, entrypoint=Entrypoint(callable=function, args=args)))

def begin(name, wait):
    def go():
        try:
            seen[name] = wait()
        except ConnectionLostError:
            seen[name] = "ConnectionLostError"
    thread = threading.Thread(target=go)
    thread.start()
    return thread

pools = [deploy(cluster, Sleeper, name=f"Sleeper{number}") for number in range(4)]
short, long = stopped_s / 2, stopped_s + 1
futures = [pools[2].submit().sleep(short), pools[3].submit().sleep(long)]
short_job, long_job, chatty = launch(time.sleep, short), launch(time.sleep, long), launch(chatter, lines, long / lines)
threads = [
    begin("short call", lambda: pools[0].call().sleep(short)),
    begin("long call", lambda: pools[1].call().sleep(long)),
    begin("short future", futures[0].result),
    begin("long future", futures[1].result),
    begin("short job", lambda: cluster.wait(short_job).status),
    begin("long job", lambda: cluster.wait(long_job).status),
    begin("lines", lambda: [line.text for line in cluster.logs(chatty, follow=True)]),
]
print("waiting", flush=True)
sys.stdin.readline()
for thread in threads:
    thread.join()
seen["at last"] = pools[0].call().sleep(0)
print(json.dumps(seen))
"""


def test_what_it_waits_for_comes_and_its_calls_are_told(tmp_path: Path, family: Family) -> None:
    with Daemons(tmp_path, Family()) as daemons:
        _ping_quickly(daemons)
        daemons.start_controller()
        daemons.start_worker()
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(STOPPED_S), str(LINES)],
            env=family.environment(FLUSTER_CLUSTER_ADDRESS=daemons.address, **PINGS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stdout.readline() == "waiting\n"
            client.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)  # how long it is stopped is what is tested
            client.send_signal(signal.SIGCONT)
            client.stdin.write("\n")
            client.stdin.flush()
            seen = json.loads(client.stdout.readline())
        assert seen.pop("lost", False), "the server did not cut it off"
        for name in ("short call", "long call", "short future", "long future"):
            assert seen.pop(name) in ("slept", "ConnectionLostError")
        lines = [str(number) for number in range(LINES)]
        assert seen == {"short job": "SUCCEEDED", "long job": "SUCCEEDED", "lines": lines, "at last": "slept"}


def _ping_quickly(daemons: Daemons) -> None:
    """Have the server cut off sooner the clients that connect from now on."""
    (configuration,) = daemons.folder.glob("nats/*.conf")
    text = configuration.read_text()
    assert SERVER_PINGS in text
    configuration.write_text(text.replace(SERVER_PINGS, QUICK_PINGS))
    assert daemons.server.pid is not None
    os.kill(daemons.server.pid, signal.SIGHUP)
