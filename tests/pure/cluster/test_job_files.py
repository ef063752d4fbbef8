"""Which namespaces a worker serves by the credentials in a folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.core.roles import Role, User
from fluster_bus.trust.authority import Authority
from fluster_services.settings import SettingError
from fluster_services.worker.presence.identity import JobFiles, job_credentials

URL = "nats://127.0.0.1:4222"
WORKER = BusAddress(URL, "worker", "w")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    return folder


def _job(namespace: str, password: str = "p") -> BusAddress:
    return BusAddress(URL, User(Role.JOB, namespace).name, password)


def test_files_of_jobs_are_found_and_others_are_passed_over(folder: Path) -> None:
    authority = Authority.of_cluster(folder.parent / "authority")
    made = authority.issue(Role.JOB, "jobs-of-b", ("b",))
    BusAddress(URL, token=made.token, seed=made.seed).save(folder / "b.creds")
    other = authority.issue(Role.CLIENT, "alice", ("c",))
    BusAddress(URL, token=other.token, seed=other.seed).save(folder / "alice.creds")
    _job("a").save(folder / "job_a.json")
    BusAddress(URL, "client_d", "p").save(folder / "client_d.json")
    WORKER.save(folder / "worker.json")
    (folder / "passwords.env").write_text("FLUSTER_WORKER_PASSWORD=w\n")
    found = JobFiles(folder, WORKER).read()
    assert sorted(found) == ["a", "b"]
    assert (found["a"].password, found["b"].token) == ("p", made.token)  # type: ignore[index]


def test_what_comes_goes_and_changes_is_seen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = JobFiles(folder, WORKER)
    assert files.read() == {}
    _job("a").save(folder / "a.json")
    (folder / "broken.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert list(files.read()) == ["a"]
        assert list(files.read()) == ["a"]
    (said,) = [each.getMessage() for each in caplog.records]
    assert "broken.json" in said
    _job("a", "another").save(folder / "a.json")
    _job("b").save(folder / "broken.json")
    assert {namespace: each.password for namespace, each in files.read().items()} == {"a": "another", "b": "p"}
    (folder / "a.json").unlink()
    assert list(files.read()) == ["b"]


def test_without_a_list_it_serves_what_the_folder_has_and_follows_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLUSTER_NAMESPACES", raising=False)
    monkeypatch.setenv("FLUSTER_JOB_CREDENTIALS_DIR", str(folder))
    with pytest.raises(SettingError, match=f"FLUSTER_JOB_CREDENTIALS_DIR='{folder}' has no credentials of jobs, "):
        job_credentials(WORKER)
    _job("a").save(folder / "a.json")
    _job("b").save(folder / "b.json")
    served, followed = job_credentials(WORKER)
    assert (sorted(served), followed) == (["a", "b"], folder)
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_PASSWORD", "d")
    assert sorted(job_credentials(WORKER)[0]) == ["a", "b", "default"]
    monkeypatch.setenv("FLUSTER_NAMESPACES", "b")
    served, followed = job_credentials(WORKER)
    assert (list(served), followed) == (["b"], None)  # these were chosen, and others are not added to them
    monkeypatch.setenv("FLUSTER_NAMESPACES", "c")
    with pytest.raises(SettingError, match="neither FLUSTER_JOB_C_CREDENTIALS nor FLUSTER_JOB_C_PASSWORD is set"):
        job_credentials(WORKER)
    monkeypatch.setenv("FLUSTER_JOB_CREDENTIALS_DIR", str(folder / "none"))
    with pytest.raises(SettingError, match="none' cannot be read: No such file or directory"):
        job_credentials(WORKER)


def test_signed_credentials_are_the_limit_of_what_it_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUSTER_NAMESPACES", raising=False)
    monkeypatch.setenv("FLUSTER_JOB_CREDENTIALS_DIR", str(folder))
    made = Authority.of_cluster(folder.parent / "authority").issue(Role.WORKER, "w1", ("a", "later"))
    worker = BusAddress(URL, token=made.token, seed=made.seed)
    _job("strange").save(folder / "strange.json")
    with pytest.raises(SettingError, match="has no credentials of jobs of a, later, and"):
        job_credentials(worker)
    _job("a").save(folder / "a.json")
    served, followed = job_credentials(worker)
    assert (list(served), followed) == (["a"], folder)
