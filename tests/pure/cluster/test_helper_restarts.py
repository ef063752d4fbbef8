"""When the helper process of a program is started again."""

from fluster.cluster.helper_process import Restarts


def test_the_first_at_once_and_no_more_than_five_in_a_row() -> None:
    restarts = Restarts()
    assert [restarts.on_end(0.1) for _ in range(7)] == [0, 0.2, 0.4, 0.8, 1.6, None, None]


def test_one_that_ran_well_for_a_while_ends_a_row() -> None:
    restarts = Restarts()
    for _ in range(100):
        assert restarts.on_end(60) == 0
        assert restarts.on_end(59) == 0.2
