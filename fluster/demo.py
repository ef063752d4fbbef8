"""Which names does Python's own standard library use, how often, and where?

A job has a pool of workers parse the library's files. They send what they find to actors, each of which keeps one
shard of an inverted index. What the index says in the end is checked against a plain loop over the same files.

    python examples/stdlib_index.py --find open        or        fluster demo --find open
"""

from __future__ import annotations

import argparse
import ast
import heapq
import os
import platform
import sys
import sysconfig
import time
import tokenize
import warnings
import zlib
from collections import Counter
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fluster import (
    ActorPool,
    ActorServer,
    Entrypoint,
    FixedResolver,
    JobRequest,
    LocalCluster,
    ResourceConfig,
    WorkerPool,
    actor,
    current_cluster,
    deploy,
)

SHARDS = 4
FILES_A_TASK = 20  # few enough for the last tasks to end together, and to keep every message small
TOP = 10
SMALL = ResourceConfig.with_cpu(1, memory="256MiB")
# Where syntax nodes keep the identifiers that they define or use.
NAMES = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.alias: "name"}
DEFINITIONS = {ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name"}
NODES: dict[type[ast.AST], str] = {**NAMES, **DEFINITIONS}

Postings = dict[str, dict[str, int]]  # {name: {file: uses}}
Ranking = list[tuple[str, int]]  # [(name or file, uses)], the most used first


def standard_library() -> list[str]:
    """Its files, each once, without what was installed beside it."""
    folder = Path(sysconfig.get_path("stdlib")).resolve()
    found = {path.resolve() for path in folder.rglob("*.py") if path.is_file()}
    return sorted(str(path) for path in found if not {"site-packages", "dist-packages"} & set(path.parts))


def parse(paths: list[str]) -> tuple[Counter[str], Postings]:
    """Counts, and which file uses which name how often. Some files test the parser and are made not to parse."""
    counts, postings = Counter(files=len(paths)), Postings()
    for path in paths:
        try:
            with tokenize.open(path) as file, warnings.catch_warnings():  # in the encoding that the file declares
                warnings.simplefilter("ignore")
                source = file.read()
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            counts["not parsed"] += 1
            continue
        nodes = [node for node in ast.walk(tree) if type(node) in NODES]
        names = Counter(getattr(node, NODES[type(node)]) or "**" for node in nodes)  # a keyword without name is f(**x)
        counts.update(lines=source.count("\n"), definitions=sum(type(node) in DEFINITIONS for node in nodes))
        for name, uses in names.items():
            postings.setdefault(name, {})[path] = uses
    return counts, postings


def ranking(uses: dict[str, int], limit: int | None = None) -> Ranking:
    return heapq.nsmallest(limit or len(uses), uses.items(), key=lambda pair: (-pair[1], pair[0]))


@actor(name="index")
class Shard:
    """Owns some of the names. An actor handles one call at a time, so it needs no locks."""

    def __init__(self) -> None:
        self.postings = Postings()

    def add(self, postings: Postings) -> None:
        for name, files in postings.items():
            self.postings.setdefault(name, {}).update(files)

    def summary(self) -> tuple[Counter[str], Ranking]:
        """Counts that may be added up over shards, and the names used most."""
        uses = {name: sum(files.values()) for name, files in self.postings.items()}
        checksum = sum(zlib.crc32(f"{name} {count}".encode()) for name, count in uses.items())
        return Counter(names=len(uses), uses=sum(uses.values()), checksum=checksum), ranking(uses, TOP)

    def where(self, name: str) -> Ranking:
        return ranking(self.postings.get(name, {}))


@dataclass(frozen=True)
class Report:
    counts: Counter[str]
    top: Ranking  # names
    found: Ranking  # files that use the name which was looked for


class ProgressDisplay:
    """An actor in the process at the terminal: the job tells it how far it is, and the outcome."""

    def __init__(self, bar: Progress, files: int) -> None:
        self.bar = bar
        self.task = bar.add_task("Indexing", total=files)
        self.report: Report | None = None

    def advance(self, files: int) -> None:
        self.bar.advance(self.task, files)

    def hand_in(self, report: Report) -> None:
        self.report = report


def shard_of(name: str) -> int:
    return zlib.crc32(name.encode()) % SHARDS  # hash() of a text differs from process to process


def shards_at(addresses: list[str]) -> list[ActorPool[Shard]]:
    """Each shard alone: calls to a pool go to any of its members, but a name has one owner."""
    resolver = FixedResolver({f"shard-{n}": address for n, address in enumerate(addresses)}, current_cluster())
    return [resolver.lookup(f"shard-{n}") for n in range(len(addresses))]


def index_files(paths: list[str], addresses: list[str]) -> Counter[str]:
    """A worker's task: parse some files, and send each shard its part of the names."""
    counts, postings = parse(paths)
    parts: list[Postings] = [{} for _ in addresses]
    for name, files in postings.items():
        parts[shard_of(name)][name] = files
    shards = shards_at(addresses)
    for call in [shard.submit().add(part) for shard, part in zip(shards, parts, strict=True)]:
        call.result()
    return counts


def build_index(paths: list[str], find: str, workers: int) -> None:
    """The job. The workers and actors that it starts end with it."""
    cluster = current_cluster()
    display: ActorPool[ProgressDisplay] = ActorPool(cluster, "display")
    index = deploy(cluster, Shard, replicas=SHARDS)
    addresses = [member.address for member in index.members()]
    counts: Counter[str] = Counter()
    with WorkerPool(cluster, workers, SMALL, name_prefix="parser") as pool:
        parts = [paths[start : start + FILES_A_TASK] for start in range(0, len(paths), FILES_A_TASK)]
        for task in as_completed([pool.submit(index_files, part, addresses) for part in parts]):
            counts += task.result()
            display.call().advance(task.result()["files"])
    top: dict[str, int] = {}
    for shard_counts, shard_top in index.broadcast().summary().results():
        counts += shard_counts
        top.update(shard_top)
    found = shards_at(addresses)[shard_of(find)].call().where(find)
    display.call().hand_in(Report(counts, ranking(top, TOP), found))


def on_cluster(paths: list[str], find: str, workers: int) -> Report:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with LocalCluster(cpu=workers + 1) as cluster, bar:
        display = ProgressDisplay(bar, len(paths))
        server = ActorServer(cluster)
        server.register("display", display)
        server.serve_background()
        entrypoint = Entrypoint(callable=build_index, args=(paths, find, workers))
        job = cluster.launch(JobRequest(name="stdlib-index", entrypoint=entrypoint, resources=SMALL))
        cluster.wait(job, raise_on_failure=True)
    assert display.report is not None  # handed in, since the job succeeded
    return display.report


def in_one_process(paths: list[str], find: str) -> Report:
    """The same by a plain loop: an actor's class is a class like any other."""
    shard = Shard()
    counts, postings = parse(paths)
    shard.add(postings)
    shard_counts, top = shard.summary()
    return Report(counts + shard_counts, top, shard.where(find))


def run(find: str = "open", workers: int | None = None, limit_files: int | None = None) -> bool:
    """Print the report; True if the plain loop finds the same."""
    workers = workers or max(2, os.cpu_count() or 1)
    paths = standard_library()[:limit_files]
    started = time.monotonic()
    report = on_cluster(paths, find, workers)
    middle = time.monotonic()
    print(
        f"The standard library of Python {platform.python_version()}, indexed by {workers} workers and {SHARDS} actors"
    )
    for what in ("files", "not parsed", "lines", "definitions", "names", "uses"):
        print(f"  {what:12}{report.counts[what]:>12,}")
    print("Most used:", ", ".join(f"{name} {uses:,}" for name, uses in report.top))
    print(f"{find!r} is used {sum(uses for _, uses in report.found):,} times, in {len(report.found):,} files")
    for path, uses in report.found[:5]:
        print(f"  {uses:12,}  {path}")
    same = in_one_process(paths, find) == report
    print(f"Time taken: {middle - started:.1f} s on the cluster, {time.monotonic() - middle:.1f} s in a single process")
    print("The single process counts the same." if same else "THE SINGLE PROCESS COUNTS DIFFERENTLY.")
    return same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", default="open", metavar="NAME", help="the name to look for")
    parser.add_argument("--workers", type=int, help="processes that parse")
    parser.add_argument("--limit-files", type=int, metavar="N", help="only the first N files")
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
