"""What a cluster of this machine offers beside CPUs and memory: given by options or variables, or found."""

from pathlib import Path

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.messages import Capacity, JobRequest, JobStatus, ResourceConfig
from fluster_bus.messages.parts.resources import given_labels
from tests.system.job_requests import command, texts
from tests.system.processes import Family
from tests.waiting import wait_until

_SHOW = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")


def _totals(cluster: LocalCluster) -> list[Capacity]:
    return [worker.info.total for worker in sorted(cluster.list_workers(), key=lambda each: each.info.worker_id)]


def _shown(cluster: LocalCluster, resources: ResourceConfig) -> str:
    request: JobRequest = command(*_SHOW).model_copy(update={"resources": resources})
    info = cluster.wait(cluster.launch(request), timeout=60)
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    (line,) = texts(cluster, info.job_id)
    return line


def test_gpus_labels_and_disk_are_given_and_shared(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("FLUSTER_LABELS", "zone=b")
    monkeypatch.setenv("FLUSTER_DISK", "10GB")
    monkeypatch.setenv("FLUSTER_GPUS", "0")
    with LocalCluster(workers=2, gpus="h100:3", labels={"zone": "a"}) as cluster:
        totals = _totals(cluster)
        assert [(each.device, each.variant, each.devices) for each in totals] == [
            ("gpu", "h100", 1),
            ("gpu", "h100", 2),
        ]
        assert {(each.disk, given_labels(each.labels)) for each in totals} == {(5 * 1000**3, ("zone=a",))}
        assert _shown(cluster, ResourceConfig.with_gpu("h100", 2)) == "5,6"
        assert _shown(cluster, ResourceConfig.with_gpu("h100", 1)) in {"4", "5", "6"}
        assert _shown(cluster, ResourceConfig(labels={"zone": "a"})) == "4,5,6"  # the program's own


def test_gpus_are_found_once_the_cluster_is_up(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    gate = tmp_path / "gate"
    nvidia_smi = tmp_path / "bin" / "nvidia-smi"
    row = "0, GPU-1, NVIDIA H100 80GB HBM3, 00000000:10:00.0, 81559, 4, 0, 31, 71.25, 0, Disabled, 580.159.04"
    nvidia_smi.write_text(f"#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\necho {row}\n")
    nvidia_smi.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with LocalCluster() as cluster:
        assert [(each.devices, each.disk > 0) for each in _totals(cluster)] == [(0, True)]
        job_id = cluster.launch(command(*_SHOW).model_copy(update={"resources": ResourceConfig.with_gpu("h100", 1)}))
        gate.touch()
        assert cluster.wait(job_id, timeout=60).status is JobStatus.SUCCEEDED
        assert texts(cluster, job_id) == ["0"]
        wait_until(lambda: [each.devices for each in _totals(cluster)] == [1])
        assert _shown(cluster, ResourceConfig()) == ""


@pytest.mark.parametrize(
    ("variable", "text"), [("FLUSTER_GPUS", "h100:x"), ("FLUSTER_DISK", "much"), ("FLUSTER_LABELS", "zone")]
)
def test_a_variable_that_is_wrong_is_named(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable}: .*{text}"):
        LocalCluster()
