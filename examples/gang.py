"""Four tasks that start together and add up their parts at the first of them, as a training job would its gradients."""

import os
import socket
import time

from fluster import Entrypoint, JobRequest, LocalCluster


def train() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, _, port = os.environ["FLUSTER_GANG_ADDRESS"].rpartition(":")
    part = (rank + 1) ** 2
    if rank == 0:
        with socket.create_server((host, int(port))) as server:
            for _ in range(size - 1):
                with server.accept()[0] as peer:
                    part += int(peer.recv(64))
        print(f"{size} tasks together: {part}")
        return
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=60) as first:
                first.sendall(str(part).encode())
            return
        except ConnectionRefusedError:  # all have started, though the first may not listen yet
            time.sleep(0.05)


if __name__ == "__main__":
    with LocalCluster(workers=2) as cluster:
        request = JobRequest(name="train", entrypoint=Entrypoint(callable=train), replicas=4, gang=True)
        job_id = cluster.launch(request)
        cluster.wait(job_id, timeout=60, raise_on_failure=True)
        for line in cluster.logs(job_id):
            print(line.text)
