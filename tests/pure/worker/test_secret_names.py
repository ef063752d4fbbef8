"""What is taken for a secret, shown and passed on."""

import pytest

from fluster_bus.core.names import is_secret_name, masked
from fluster_services.worker.contract.config import program_environment


@pytest.mark.parametrize("name", ["HF_TOKEN", "client_secret", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "WANDB_API_KEY"])
def test_names_that_look_like_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert masked({name: "x", "MODE": "full"}) == {name: "***", "MODE": "full"}


@pytest.mark.parametrize("name", ["MODE", "PATH", "OMP_NUM_THREADS", "SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM"])
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


def test_named_secrets_are_masked_too() -> None:
    assert masked({"DSN": "postgres://u:p@h", "MODE": "full"}, ["DSN"]) == {"DSN": "***", "MODE": "full"}


def test_what_is_about_the_program_itself_is_not_passed_on() -> None:
    variables = {"A": "1", "MY_TOKEN": "t", "FLUSTER_X": "x", "SLURM_JOB_ID": "7", "PYTHONPATH": "p", "PATH": "/bin"}
    assert program_environment(variables, with_secrets=True) == {"A": "1", "MY_TOKEN": "t", "PATH": "/bin"}
    assert program_environment(variables, with_secrets=False) == {"A": "1", "PATH": "/bin"}
