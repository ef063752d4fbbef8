from __future__ import annotations

from fluster_services.worker.engine_images import PullProgress

MIB = 1 << 20


def told(layer: str, status: str, current: int = 0, total: int = 0) -> dict[str, object]:
    detail = {"current": current, "total": total} if total else {}
    return {"id": layer, "status": status, "progressDetail": detail}


def after(*steps: dict[str, object]) -> str:
    progress = PullProgress("python:3.12")
    for step in steps:
        progress.on_step(step)
    return progress.text()


PULLING: list[dict[str, object]] = [
    {"status": "Pulling from library/python", "id": "3.12"},
    told("a", "Pulling fs layer"),
    told("b", "Waiting"),
]


def test_before_layers_are_known_the_image_is_named() -> None:
    assert after() == after({"status": "Pulling from library/python", "id": "3.12"}) == "pulling image python:3.12"


def test_bytes_are_those_of_layers_whose_sizes_are_known() -> None:
    first = told("a", "Downloading", 20 * MIB, 100 * MIB)
    text = "pulling image python:3.12: 20 MiB of {}, 0 of 2 layers are there"
    assert after(*PULLING, first) == text.format("at least 100 MiB")
    second = told("b", "Downloading", 1, 50 * MIB)
    assert after(*PULLING, first, second) == text.format("150 MiB")


def test_what_is_loaded_counts_in_full_and_what_is_there_as_a_layer() -> None:
    steps = [told("a", "Downloading", 20 * MIB, 100 * MIB), told("a", "Download complete")]
    assert "100 MiB of at least 100 MiB, 0 of 2 layers" in after(*PULLING, *steps)
    assert "100 MiB of at least 100 MiB, 1 of 2 layers" in after(*PULLING, *steps, told("a", "Pull complete"))
    # What the engine unpacks it counts anew.
    assert "100 MiB of at least 100 MiB" in after(*PULLING, *steps, told("a", "Extracting", 1 * MIB, 100 * MIB))


def test_once_all_is_loaded_it_is_unpacked() -> None:
    steps = [told("a", "Already exists"), told("b", "Downloading", 1, 2), told("b", "Verifying Checksum")]
    assert after(*PULLING, *steps) == "unpacking image python:3.12: 1 of 2 layers are there"


def test_a_retry_is_still_a_layer_that_is_pulled() -> None:
    step = told("a", "Downloading", 20 * MIB, 100 * MIB)
    assert after(*PULLING, step, told("a", "Retrying in 5 seconds")).startswith("pulling image python:3.12: 20 MiB of")
