"""What another user of the machine may write into the lock of a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster_services.worker.gpus.holders import Holder, described, look_for, parse_note, why_not_gone

_NOTE: dict[str, Any] = json.loads(Holder.here("ns.job.0.1", since_boot_s=1.0, mark="A=b").as_note())
_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=50), st.lists(st.text(max_size=50))
)


@given(st.dictionaries(st.sampled_from(sorted(_NOTE)), _ODD))
@example({"since_boot_s": float("nan")})
@example({"since_boot_s": 10**400})
@example({"task_pid": 10**400, "uid": -(10**400)})
@example({"groups": ["/sys/fs/cgroup/a\0b", "/sys/fs/cgroup/../../etc/passwd", "/sys/fs/cgroup/" + 5_000 * "a"]})
@example({"mark": "A=\udcff", "boot_id": "\udcff"})
@example({"mark": "A=\ud800\0"})
def test_no_note_breaks_who_reads_it(odd: dict[str, Any]) -> None:
    text = json.dumps({**_NOTE, **odd})
    assert described(text)
    holder = parse_note(text)
    if holder is not None:
        why_not_gone(holder, look_for(holder, ()))


@given(st.text(max_size=300))
@example("[" * 5_000)
@example('{"fluster":1')
def test_a_text_that_is_no_note_names_no_holder(text: str) -> None:
    assert parse_note(text) is None


@pytest.mark.parametrize("name", ["../../info", "a/json?x=", "a/../b", "..", "-a", "a b", "a\n"])
def test_an_engine_is_asked_for_containers_alone(name: str) -> None:
    assert parse_note(json.dumps({**_NOTE, "container": "fluster-1.a_b"})) is not None
    assert parse_note(json.dumps({**_NOTE, "container": name})) is None
