"""Groups as files, where no kernel stands behind them."""

from pathlib import Path

import pytest

from fluster_services.worker.linux import cgroups


def test_a_file_that_the_kernel_may_lack_is_left_out(tmp_path: Path) -> None:
    group = tmp_path / "g"
    cgroups.make({str(group): {"memory.max": "10", "memory.swap.max?": "0"}})
    assert {path.name: path.read_text() for path in group.iterdir()} == {"memory.max": "10"}
    (group / "memory.swap.max").touch()
    cgroups.make({str(group): {"memory.max": "20", "memory.swap.max?": "0"}})
    assert {path.name: path.read_text() for path in group.iterdir()} == {"memory.max": "20", "memory.swap.max": "0"}


def test_what_is_gone_is_removed_and_what_is_used_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "used" / "x").mkdir(parents=True)
    assert cgroups.remove({str(tmp_path / "gone"): {}, str(tmp_path / "empty"): {}})
    assert not (tmp_path / "empty").exists()
    assert not cgroups.remove({str(tmp_path / "used"): {}})


def test_controllers_are_given_on_to_the_groups_below(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory hugetlb\n")
    cgroups.delegate(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory"


def test_where_none_may_be_given_on_nothing_is_enforced(tmp_path: Path) -> None:
    assert cgroups.delegate(tmp_path / "missing") == ""


def test_limits_that_cannot_be_had_are_an_error_only_when_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_controllers", lambda: ({}, {"cpu": "the kernel offers none"}))
    found = cgroups.find_enforcer("auto")
    assert found.describe() == "limits of tasks are not enforced; no cpu: the kernel offers none"
    with pytest.raises(cgroups.LimitsError, match="Delegate=yes"):
        cgroups.find_enforcer("always")
    assert cgroups.find_enforcer("never").controllers == {}
