"""Backups of what a cluster keeps: made while it runs, looked at, and restored."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import say
from fluster.cli.common.options import Options
from fluster.cli.common.output import size, write, write_json, write_table

if TYPE_CHECKING:
    from fluster_bus.backups.contents import Manifest
    from fluster_bus.backups.making import BackupProgress
    from fluster_bus.connection.bus import Bus

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the backup.")]


def create(context: typer.Context, folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Is made.")]) -> None:
    """Write all that the cluster keeps into a folder, while it runs. It holds secrets of jobs: it is for you alone.

    Try:
      fluster --address operator.json backup create backups/monday
    """
    from fluster_bus.backups.making import make_backup

    with _bar() as tell:
        made = asyncio.run(_with_bus(context, lambda bus: make_backup(bus, folder, on_progress=tell)))
    if Options.of(context).json:
        write_json(_described(made))
        return
    write(f"{folder}: {_summary(made)}")
    if made.left_out:
        say(f"left out, as they are none of Fluster's: {', '.join(made.left_out)}")


def show(
    context: typer.Context,
    folder: Folder,
    *,
    check: Annotated[bool, typer.Option("--check", help="Read all files, and compare their digests.")] = False,
) -> None:
    """Say what a backup has.

    Try:
      fluster backup show backups/monday --check
    """
    from fluster_bus.backups.contents import check_files, read_manifest

    manifest = read_manifest(folder)
    if check:
        check_files(folder, manifest)
    if Options.of(context).json:
        write_json(_described(manifest))
        return
    columns = ["STREAM", "NAMESPACE", "MESSAGES", "SIZE"]
    write_table(
        columns,
        [[each.stream, each.namespace or "-", str(each.messages), size(each.size)] for each in manifest.streams],
    )
    say(_summary(manifest))


def restore(
    context: typer.Context,
    folder: Folder,
    *,
    replace: Annotated[bool, typer.Option("--replace", help="Lose what the cluster has since or besides.")] = False,
) -> None:
    """Make what the cluster keeps what it was. Its controllers wait meanwhile, and lead again when it is done.

    If it ends in the middle, run it again with --replace: until then controllers wait.

    Try:
      fluster --address operator.json backup restore backups/monday
    """
    from fluster_bus.backups.restoring import restore_backup

    with _bar() as tell:
        done = asyncio.run(
            _with_bus(context, lambda bus: restore_backup(bus, folder, replace=replace, on_progress=tell))
        )
    if Options.of(context).json:
        write_json(_described(done))
    else:
        write(f"restored: {_summary(done)}")


async def _with_bus(context: typer.Context, work: Callable[[Bus], Awaitable[Manifest]]) -> Manifest:
    from fluster.cluster.up_clusters import find_address
    from fluster_bus.access.address import BusAddress
    from fluster_bus.connection.bus import Bus

    given = Options.of(context).address
    bus = await Bus.connect(BusAddress.parse(given) if given is not None else find_address(), name="fluster backup")
    try:
        return await work(bus)
    finally:
        await bus.close()


@contextmanager
def _bar() -> Iterator[Callable[[BackupProgress], None]]:
    """What shows on stderr how far it is, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), DownloadColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown:
        bar = shown.add_task("", total=None)
        yield lambda told: shown.update(bar, total=told.total, completed=told.done, description=told.stream)


def _summary(manifest: Manifest) -> str:
    messages = sum(each.messages for each in manifest.streams)
    taken = datetime.fromtimestamp(manifest.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{len(manifest.streams)} streams, {messages} messages, {size(manifest.size)}, as of {taken}"


def _described(manifest: Manifest) -> dict[str, object]:
    """Without the streams' configurations, which are the server's."""
    return manifest.model_dump(mode="json", exclude={"streams": {"__all__": {"config"}}})
