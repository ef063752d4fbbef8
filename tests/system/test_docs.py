"""Every command and code block of README and docs runs as it stands, in an empty folder."""

from pathlib import Path

import pytest

from tests.doc_pages import PAGES, PageRun, new_users_shell
from tests.optional import import_or_skip
from tests.system.processes import Family

_NEEDS = {
    "docs/how-to/joblib.md": ("sklearn", "`make setup` installs it"),
    "docs/how-to/zephyr.md": ("zephyr", "`make setup-zephyr` installs it"),
}
# It has a test of its own, which also looks at each answer.
_ELSEWHERE = {"docs/debugging-with-nats.md": "tests/system/test_debugging_guide.py"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in _ELSEWHERE])
def test_the_blocks_of_a_page_run_as_they_stand(page: str, tmp_path: Path, family: Family) -> None:
    if page in _NEEDS:
        import_or_skip(*_NEEDS[page])
    with new_users_shell(tmp_path):
        PageRun().run(page)
