"""How far a job is, as a bar on the terminal of the user who waits for it."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from fluster.cli.common.exit_codes import one_line

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, JobInfo


def wait_shown(cluster: Cluster, job_id: JobId) -> JobInfo:
    """The job once it has finished. Meanwhile stderr shows how far it is, if that is a terminal and the job reports it."""
    if not sys.stderr.isatty():
        return cluster.wait(job_id)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as shown,
        closing(cluster.watch(job_id)) as infos,  # type: ignore[type-var]  # it is a generator
    ):
        bar = shown.add_task("", total=None, visible=False)
        for info in infos:
            if info.progress is not None:
                text = Text(one_line(info.progress_message)).plain
                shown.update(bar, total=1.0, completed=info.progress, description=text, visible=True)
            if info.status.finished():
                return info
    return cluster.wait(job_id)
