import pytest

from tests.waiting import wait_until, wait_until_async


def test_the_true_value_comes_back() -> None:
    looks: list[int] = []

    def third_look() -> str:
        looks.append(1)
        return "there" if len(looks) == 3 else ""

    assert wait_until(third_look) == "there"


def test_the_state_is_told_when_the_time_is_over() -> None:
    with pytest.raises(AssertionError, match=r"never did not come true in 0 s; state: 2 workers"):
        wait_until(_never, 0, lambda: "2 workers")


def test_the_last_value_is_told_when_nothing_describes_the_state() -> None:
    with pytest.raises(AssertionError, match=r"it last was \[\]"):
        wait_until(_never, 0)


@pytest.mark.anyio
async def test_the_awaited_one_takes_functions_and_coroutine_functions() -> None:
    async def found() -> int:
        return 7

    assert await wait_until_async(found) == 7
    assert await wait_until_async(lambda: 8) == 8
    with pytest.raises(AssertionError, match="never did not come true"):
        await wait_until_async(_never, 0)


def _never() -> list[str]:
    return []
