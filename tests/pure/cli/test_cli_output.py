import json

import pytest

from fluster.cli.common.exit_codes import one_line
from fluster.cli.common.output import age, duration, size, write_json, write_table


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (59, "59s"), (119, "119s"), (121, "2m"), (7_300, "2h"), (200_000, "2d")]
)
def test_ages_are_short(seconds: float, shown: str) -> None:
    assert age(1_000.0, now=1_000.0 + seconds) == shown


def test_what_has_not_happened_has_no_age_and_no_duration() -> None:
    assert age(None) == duration(None, None) == "-"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0089, "0.01s"), (9.5, "9.50s"), (12.34, "12.3s"), (61, "1:01"), (3_723, "1:02:03")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(1_000.0, 1_000.0 + seconds) == shown
    assert duration(1_000.0, None, now=1_000.0 + seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (3 << 40, "3 TiB")])
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_what_could_steer_a_terminal_is_left_out() -> None:
    assert one_line("\x1b[31mred\x1b[0m\nand\tmore\r") == "[31mred [0m and more"


def test_a_table_in_a_pipe_has_all_of_its_last_column_and_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    write_table(["ID", "STATE", "ERROR"], [["a-1", "FAILED", long], ["b-22", "RUNNING", ""]])
    assert capsys.readouterr().out.splitlines() == [
        "ID    STATE    ERROR",
        f"a-1   FAILED   {long}",
        "b-22  RUNNING",
    ]


def test_markup_in_a_cell_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(["ERROR"], [["[bold]list[int]"]])
    assert capsys.readouterr().out.splitlines()[1] == "[bold]list[int]"


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"name": "Ä", "tasks": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"name": "Ä", "tasks": [1, None]}
