"""The tables that benchmarks print."""

from benchmarks.row import Row, as_markdown


def test_a_table_is_one_that_the_readme_can_take() -> None:
    rows = [Row("a call", "2 µs", "nc.request 4 µs", 0.5, "≤ 0.8"), Row("memory", "3 KB")]
    assert as_markdown(rows) == (
        "| what | measured | against, in the same run | ratio | to reach |\n"
        "| --- | --: | --- | --: | --- |\n"
        "| a call | 2 µs | nc.request 4 µs | 0.50 | ≤ 0.8 |\n"
        "| memory | 3 KB |  |  |  |\n"
    )
