"""What of README and docs is run, and what is not: nothing else may be left out."""

import re

import pytest

from tests.doc_pages import LANGUAGES, PAGES, ROOT, blocks, skipped

# By page: the first line of a block that CI does not run, and why.
NOT_RUN = {
    "README.md": {"make demo": "CI itself runs both, in a checkout"},
    "benchmarks/README.md": {"make bench": "takes minutes, and other actor frameworks beside Fluster"},
    "docs/actors/durable.md": {
        "nats req '$JS.API.DIRECT.GET.FLUSTER_CALLS_<ns>'": "needs the nats tool, and a call that waits",
        "nats stream purge FLUSTER_CALLS_<ns>": "needs the nats tool, and a call that waits",
    },
    "docs/actors/data.md": {
        "nats req fluster.default.actors.shapes": "needs the nats tool",
        "nats micro info shapes": "needs the nats tool",
    },
    "docs/how-to/containers.md": {
        "from fluster import Entrypoint": "needs a Docker engine with images of a registry",
        "docker ps": "needs a Docker engine",
    },
    "docs/how-to/credentials.md": {
        "fluster credentials init --url tls://bus-1": "is shown above with one server, and tests/component/bus/test_encrypted_groups.py runs it with three"
    }
    | dict.fromkeys(
        (
            "fluster credentials init --url tls://127",
            "fluster credentials certificates",
            "nats-server --config",
            "export FLUSTER_CLUSTER_ADDRESS",
            "fluster credentials add",
            "fluster token create",
            "fluster --address me.creds namespace add",
        ),
        "tests/system/test_signed_cluster.py runs these commands, each daemon in a terminal of its own",
    ),
    "docs/how-to/distributed-training.md": {
        "torch.distributed": "needs PyTorch and GPUs",
        "jax.distributed": "needs JAX",
    },
    "docs/how-to/joblib.md": {"pip install": "the environment of the tests has the extra already"},
    "docs/how-to/virtual-machines.md": {
        "from fluster import Entrypoint": "needs a Docker engine with images of a registry",
        "from fluster_services.vm import DockerBackend": "needs GPUs",
        "LocalCluster(backend=": "needs a Docker engine with images of a registry",
    },
    "docs/how-to/zephyr.md": {
        "pip install": "the environment of the tests has the extra already",
        "from fluster_services.vm": "needs a Docker engine with images of a registry",
        "from fluster.integrations.fray": "Zephyr for Python 3.11 has no such contexts",
    },
    "docs/how-to/backups.md": {"nats stream restore": "it needs the nats command, which is not installed here"},
    "docs/operations.md": {
        "fluster credentials passwords credentials  ": "tests/system/test_compose.py runs the compose file, with images that are made there",
        "fluster credentials passwords credentials --url": "tests/system/test_compose_three.py runs the compose file, with images that are made there",
    },
}


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why_and_stands_in_the_list(page: str) -> None:
    listed = NOT_RUN.get(page, {})
    found = skipped(page)
    assert {reason for _, reason in found} == set(listed.values())
    for line, reason in found:
        assert [why for beginning, why in listed.items() if line.startswith(beginning)] == [reason], line
    assert len(found) == len(listed)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_is_run(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= {*LANGUAGES, "text", "mermaid"}


@pytest.mark.parametrize("page", PAGES)
def test_no_code_is_shown_by_indentation_alone(page: str) -> None:
    text = re.sub(
        r"<!--.*?-->|^ *```.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert re.findall(r"(?:^|\n)\n {4,}[^ \n].*", text) == []
