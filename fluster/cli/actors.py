"""Actors: who serves, and calls to them in JSON."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.common.options import MAX_SECONDS, Options
from fluster.cli.common.output import write, write_json, write_table
from fluster_bus.core.json_types import JsonObject

if TYPE_CHECKING:
    from fluster.actors import Member
    from fluster.cluster import AsyncCluster, Cluster
    from fluster.errors import ActorNotFoundError
    from fluster_bus.messages import Endpoint

_ASK_TIMEOUT_S = 5.0


def actors(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(help="Only those whose name begins so.")] = "",
) -> None:
    """List the names under which actors serve, how many there are of each, and how they are.

    Try:
      fluster actors
    """
    options = Options.of(context)
    with options.connect() as cluster:
        names = {endpoint.name for endpoint in cluster.list_endpoints(prefix) if _is_actor(endpoint)}
        pools = cluster.portal.run(_members, cluster.asynchronous, sorted(names))
    if options.json:
        write_json([_shown(member) for members in pools.values() for member in members])
        return
    write_table(
        ["NAME", "MEMBERS", "STATES", "RESTARTS", "WORKERS", "JOBS"],
        [
            [
                name,
                str(len(members)),
                ", ".join(f"{count} {state}" for state, count in Counter(member.state for member in members).items()),
                str(sum(member.restarts for member in members)),
                ", ".join(sorted({member.worker_id or "-" for member in members})),
                ", ".join(sorted({member.job_id or "-" for member in members})),
            ]
            for name, members in pools.items()
        ],
    )


def actor(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Under which the actors serve.")],
    *,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Show what each method takes and returns, as JSON schemas.")
    ] = False,
) -> None:
    """Show how each actor of a name is, and what can be called.

    The actors themselves list their methods, for operators only. With --output json the schemas are always there.

    Try:
      fluster actor counter
      fluster actor counter --schemas
    """
    options = Options.of(context)
    with options.connect() as cluster:
        members = cluster.portal.run(_members, cluster.asynchronous, [name])[name]
        if not members:
            raise _not_found(cluster, name)
        methods = cluster.portal.run(_methods, cluster.asynchronous, members)
    if options.json:
        write_json({"name": name, "members": [_shown(member) for member in members], "methods": methods})
        return
    write_table(
        ["TASK", "STATE", "RESTARTS", "WORKER", "JOB", "ENDPOINT", "LAST ERROR"],
        [
            [
                "-" if member.job_id is None else str(member.task),
                member.state,
                str(member.restarts),
                member.worker_id or "-",
                member.job_id or "-",
                member.endpoint_id or "-",
                member.last_error or "-",
            ]
            for member in members
        ],
    )
    if methods is None:
        say("only operators are shown what can be called, or none of them answers at the moment")
        return
    write("")
    rows = [[method["signature"], method["doc"].partition("\n")[0] or "-"] for method in methods]
    write_table(["METHOD", "WHAT IT DOES"], rows)
    for method in methods if schemas else ():
        write(f"\n{one_line(str(method['name']))}")
        for which in ("parameters", "returns"):
            write(f"  {which:10} {json.dumps(method[which], ensure_ascii=False)}")


async def _members(cluster: AsyncCluster, names: Sequence[str]) -> dict[str, list[Member]]:
    """How the members of pools are."""
    from fluster.actors import AsyncActorPool

    pools: list[AsyncActorPool[object]] = [AsyncActorPool(cluster, name) for name in names]
    found = await asyncio.gather(*(pool.members() for pool in pools))
    return dict(zip(names, found, strict=True))


async def _methods(cluster: AsyncCluster, members: Sequence[Member]) -> list[JsonObject] | None:
    """What one of them says can be called, and how; None when none of them does."""
    from fluster_bus.connection.services_api import read_info
    from fluster_bus.core import server_subjects, subjects
    from fluster_bus.core.errors import BusError

    for member in members:
        if not member.endpoint_id:
            continue
        is_served = functools.partial(subjects.is_call, cluster.namespace, member.name)
        try:
            question = server_subjects.service_verb("INFO", member.name, member.endpoint_id)
            answer = await cluster.bus.request(question, timeout_s=_ASK_TIMEOUT_S, asked=cluster.namespace)
            told = read_info(answer.data, name=member.name, instance=member.endpoint_id, is_served=is_served)
        except BusError:
            continue
        return [
            {
                "name": name,
                "signature": metadata.get("signature", name),
                "doc": metadata.get("doc", ""),
                **{which: _json_or_none(metadata.get(which, "null")) for which in ("parameters", "returns")},
            }
            for name, metadata in told
        ]
    return None


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(member: Member) -> dict[str, object]:
    fields = ("name", "endpoint_id", "address", "job_id", "task", "attempt", "worker_id", "metadata")
    return {each: getattr(member, each) for each in (*fields, "state", "restarts", "last_error")}


def _is_actor(endpoint: Endpoint) -> bool:
    """Names can stand for other things too, such as a web page that a job serves."""
    from fluster_bus.core import subjects

    return endpoint.address == subjects.actor_member(endpoint.namespace, endpoint.name, endpoint.endpoint_id)


def call(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Under which the actors serve; any of them answers.")],
    method: Annotated[str, typer.Argument(help="The method to call.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="JSON", help="Its arguments, each as JSON.")] = None,
    *,
    keywords: Annotated[
        list[str] | None,
        typer.Option("--kw", metavar="KEY=JSON", help="An argument by name; may be given several times."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds to wait for the result.")] = 60,
) -> None:
    """Call a method of an actor, and print what it returns as JSON.

    Text is JSON in quotes, which the shell wants to be quoted again.

    Try:
      fluster call counter add 5
      fluster call greeter greet '"Ada"' --kw polite=true
    """
    from fluster.actors.client.json_calls import call_in_json
    from fluster.errors import ActorTimeoutError
    from fluster_bus.core.errors import NoRespondersError, RequestTimeoutError, ServiceError

    body = {
        "args": [json_argument(text) for text in arguments or []],
        "kwargs": dict(keyword_argument(text) for text in keywords or []),
    }
    with Options.of(context).connect() as cluster:
        made = functools.partial(call_in_json, timeout_s=timeout)
        try:
            result = cluster.portal.run(made, cluster.asynchronous, name, method, json.dumps(body).encode())
        except NoRespondersError as error:
            raise _not_found(cluster, name) from error
        except RequestTimeoutError as error:
            raise ActorTimeoutError(
                f"{name}.{method} has not answered within {timeout:g} s; it may still run: give it more by --timeout"
            ) from error
        except ServiceError as error:
            raise CommandError(f"{name}.{method} failed: {error.code}: {error}", ExitCode.FAILED) from error
    write_json(result)


def _not_found(cluster: Cluster, name: str) -> ActorNotFoundError:
    """What is raised for a name that no actor serves, with names that are near."""
    from fluster.errors import ActorNotFoundError
    from fluster_bus.core.errors import BusError
    from fluster_bus.core.names import near

    try:
        names = {endpoint.name for endpoint in cluster.list_endpoints() if _is_actor(endpoint)}
    except BusError:  # to be called, an actor need not be in the registry, nor that be there
        names = set()
    hint = (near(name, names) if name not in names else "") or ": `fluster actors` shows who does"
    return ActorNotFoundError(f"no actor serves {name!r} in namespace {cluster.namespace!r}{hint}")


def json_argument(text: str, shown: str = "") -> object:
    """What a word of the command line says. Raises CommandError when it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(
            f"invalid JSON {shown or text}: write numbers, true, [1, 2] or '{json.dumps(text)}' for text",
            ExitCode.USAGE,
        ) from error


def keyword_argument(text: str) -> tuple[str, Any]:
    """The name and the value in KEY=JSON. Raises CommandError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise CommandError(f"--kw {text}: write KEY=JSON", ExitCode.USAGE)
    return key, json_argument(value, text)
