"""Which file of which control group holds what."""

from pathlib import Path

import pytest

from fluster_services.worker.linux.limits import (
    CgroupController,
    Groups,
    Limits,
    find_controllers,
    group_name,
    groups,
    unified_folder,
    went_over_memory,
)

GIB = 1 << 30
V1 = {name: CgroupController(1, Path(f"/sys/fs/cgroup/{name}/mine")) for name in ("memory", "cpu", "pids")}
V2 = dict.fromkeys(("memory", "cpu", "pids"), CgroupController(2, Path("/sys/fs/cgroup/fluster.service")))

_PEAK = "memory.max_usage_in_bytes"

HYBRID_CGROUP = """\
8:pids:/
4:memory:/process_api/131a
2:cpuacct,cpu:/a
1:name=systemd:/
0::/user.slice
"""
HYBRID_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpuacct,cpu
34 31 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
35 31 0:33 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
36 31 0:34 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
UNIFIED_CGROUP = "0::/system.slice/fluster.service\n"
UNIFIED_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_controllers_of_version_1_are_found_in_their_own_trees() -> None:
    assert find_controllers(HYBRID_CGROUP, HYBRID_MOUNTS, "hugetlb") == {
        "memory": CgroupController(1, Path("/sys/fs/cgroup/memory/process_api/131a")),
        "cpu": CgroupController(1, Path("/sys/fs/cgroup/cpu/a")),
        "pids": CgroupController(1, Path("/sys/fs/cgroup/pids")),
    }


def test_what_version_1_does_not_have_is_taken_from_version_2() -> None:
    mounts = "".join(line for line in HYBRID_MOUNTS.splitlines(keepends=True) if "pids" not in line)
    assert find_controllers(HYBRID_CGROUP, mounts, "memory pids")["pids"] == CgroupController(
        2, Path("/sys/fs/cgroup/unified/user.slice")
    )
    assert unified_folder(HYBRID_CGROUP, HYBRID_MOUNTS) is None  # all are taken by version 1


def test_controllers_of_version_2_share_a_tree() -> None:
    folder = Path("/sys/fs/cgroup/system.slice/fluster.service")
    assert unified_folder(UNIFIED_CGROUP, UNIFIED_MOUNTS) == folder
    assert find_controllers(UNIFIED_CGROUP, UNIFIED_MOUNTS, "cpuset cpu memory") == {
        "cpu": CgroupController(2, folder),
        "memory": CgroupController(2, folder),
    }


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/docker/a", "/docker/a", "/sys/fs/cgroup"),  # a container, without a namespace for cgroups
        ("/docker/a", "/docker/a/b", "/sys/fs/cgroup/b"),
        ("/docker/a", "/elsewhere", "/sys/fs/cgroup"),
        ("/", "/", "/sys/fs/cgroup"),
    ],
)
def test_a_container_sees_a_part_of_the_tree(root: str, path: str, folder: str) -> None:
    mounts = f"30 23 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    assert find_controllers(f"0::{path}\n", mounts, "cpu") == {"cpu": CgroupController(2, Path(folder))}


def test_without_cgroups_nothing_is_found() -> None:
    assert find_controllers("", "", "") == {}
    assert groups(Limits(memory=GIB, cpu=1, pids=10), {}, "g") == {}


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        (
            Limits(memory=GIB, cpu=1.5, pids=10),
            {
                "/sys/fs/cgroup/memory/mine/g": {
                    "memory.limit_in_bytes": str(GIB),
                    "memory.memsw.limit_in_bytes?": str(GIB),
                },
                "/sys/fs/cgroup/cpu/mine/g": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"},
                "/sys/fs/cgroup/pids/mine/g": {"pids.max": "10"},
            },
        ),
        (
            Limits(memory=0, cpu=0.001),
            {"/sys/fs/cgroup/cpu/mine/g": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}},
        ),
        (Limits(cpu=0), {}),
    ],
)
def test_values_of_version_1(limits: Limits, wanted: Groups) -> None:
    found = groups(limits, V1, "g")
    assert found == wanted
    for files in wanted.values():  # the order counts: memory with swap may never be below memory
        assert any(list(files) == list(each) for each in found.values())


def test_values_of_version_2() -> None:
    assert groups(Limits(memory=GIB, cpu=0.5, pids=10), V2, "g") == {
        "/sys/fs/cgroup/fluster.service/g": {
            "memory.max": str(GIB),
            "memory.swap.max?": "0",
            "memory.oom.group?": "1",
            "cpu.max": "50000 100000",
            "pids.max": "10",
        }
    }


def test_each_attempt_of_each_worker_has_a_group_of_its_own() -> None:
    names = {group_name("/a/attempts/1"), group_name("/a/attempts/2"), group_name("/b/attempts/1")}
    assert len(names) == 3
    assert all("/" not in name for name in names)


@pytest.mark.parametrize(
    ("texts", "over"),
    [
        ({}, False),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", _PEAK: "1000\n"}, False),
        ({"memory.oom_control": "oom_kill 1\n", _PEAK: "980\n"}, True),
        ({"memory.oom_control": "oom_kill 1\n", _PEAK: "500\n", "memory.memsw.max_usage_in_bytes": "1000\n"}, True),
        ({"memory.oom_control": "oom_kill 1\n", _PEAK: "500\n"}, False),  # the machine's memory was over
        ({"memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n"}, True),
        ({"memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\n"}, False),
    ],
)
def test_a_death_for_the_own_limit_is_told_from_others(texts: dict[str, str], over: bool) -> None:
    assert went_over_memory(texts, 1000) is over
