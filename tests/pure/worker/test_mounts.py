"""Which folders of a worker's machine jobs may see in their containers."""

from pathlib import Path

import pytest

from fluster_services.worker.contract.container import checked_mounts
from fluster_services.worker.contract.faults import LaunchError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a set in it, a link to that, and one that leads out; beside it lies something else."""
    data = tmp_path / "data"
    (data / "set").mkdir(parents=True)
    (data / "link").symlink_to("set")
    (tmp_path / "secret").mkdir()
    (data / "out").symlink_to(tmp_path / "secret")
    return data


def test_what_lies_below_a_root_is_mounted_where_links_lead_to(data: Path) -> None:
    wanted = {"/data": str(data), "/set": str(data / "link")}
    assert checked_mounts(wanted, [str(data)]) == {"/data": str(data), "/set": str(data / "set")}
    assert checked_mounts({}, []) == {}


@pytest.mark.parametrize("name", ["../secret", "out", "../data2", ".."])
def test_what_leads_out_of_the_roots_is_refused(data: Path, name: str) -> None:
    (data.parent / "data2").mkdir()
    with pytest.raises(LaunchError, match=f"this worker mounts {data}$"):
        checked_mounts({"/data": str(data / name)}, [str(data)])


def test_without_roots_nothing_is(data: Path) -> None:
    with pytest.raises(LaunchError, match="this worker mounts nothing: see FLUSTER_MOUNT_ROOTS"):
        checked_mounts({"/data": str(data)}, [])


def test_what_is_not_there_is_refused(data: Path) -> None:
    with pytest.raises(LaunchError, match="which is not there"):
        checked_mounts({"/data": str(data / "none")}, [str(data)])


@pytest.mark.parametrize("target", ["/fluster", "/fluster/work", "/opt/fluster/own", "/proc/1", "/dev/shm"])
def test_a_place_that_is_taken_is_refused(data: Path, target: str) -> None:
    with pytest.raises(LaunchError, match=f"mounts has '{target}' as a place in the container, which is taken"):
        checked_mounts({target: str(data)}, [str(data)])


@pytest.mark.parametrize("name", [".", "set", "set/below", "link"])
def test_what_no_task_may_see_is_refused_whatever_the_roots_are(data: Path, name: str) -> None:
    (data / "set" / "below").mkdir()
    with pytest.raises(LaunchError, match="files that no task may see"):
        checked_mounts({"/data": str(data / name)}, ["/"], secret=[data / "set"])
