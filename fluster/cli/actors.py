"""Actors: who serves, and calls to them in JSON."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluster.cli.exit_codes import CommandError, ExitCode
from fluster.cli.options import MAX_SECONDS, Options
from fluster.cli.output import write_json, write_table

if TYPE_CHECKING:
    from fluster_bus.messages import Endpoint


def actors(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(help="Only those whose name begins so.")] = "",
) -> None:
    """List the names under which actors serve, and how many there are of each.

    Try:
      fluster actors
    """
    options = Options.of(context)
    with options.connect() as cluster:
        found = [endpoint for endpoint in cluster.list_endpoints(prefix) if _is_actor(endpoint)]
    if options.json:
        write_json([endpoint.model_dump(mode="json") for endpoint in found])
        return
    pools: defaultdict[str, list[Endpoint]] = defaultdict(list)
    for endpoint in found:
        pools[endpoint.name].append(endpoint)
    write_table(
        ["NAME", "MEMBERS", "WORKERS", "JOBS"],
        [
            [
                name,
                str(len(members)),
                ", ".join(sorted({member.worker_id or "-" for member in members})),
                ", ".join(sorted({member.job_id or "-" for member in members})),
            ]
            for name, members in sorted(pools.items())
        ],
    )


def _is_actor(endpoint: Endpoint) -> bool:
    """Names can stand for other things too, such as a web page that a job serves."""
    from fluster_bus import subjects

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
    from fluster.errors import ActorNotFoundError, ActorTimeoutError
    from fluster_bus import subjects
    from fluster_bus.errors import NoRespondersError, RequestTimeoutError, ServiceError

    body = {
        "args": [_json(text, text) for text in arguments or []],
        "kwargs": dict(_keyword(text) for text in keywords or []),
    }
    with Options.of(context).connect() as cluster:
        subject = subjects.actor_any(cluster.namespace, name, method)
        request = functools.partial(cluster.asynchronous.bus.request, timeout_s=timeout)
        try:
            answer = cluster.portal.run(request, subject, json.dumps(body).encode())
        except NoRespondersError as error:
            raise ActorNotFoundError(
                f"no actor serves {name!r} in namespace {cluster.namespace!r}: `fluster actors` shows who does"
            ) from error
        except RequestTimeoutError as error:
            raise ActorTimeoutError(
                f"{name}.{method} has not answered within {timeout:g} s; it may still run: give it more by --timeout"
            ) from error
        except ServiceError as error:
            raise CommandError(f"{name}.{method} failed: {error.code}: {error}", ExitCode.FAILED) from error
    write_json(json.loads(answer.data)["result"])


def _json(text: str, shown: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(
            f"{shown} is no JSON: write numbers, true, [1, 2] or '{json.dumps(text)}' for text", ExitCode.USAGE
        ) from error


def _keyword(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise CommandError(f"--kw {text}: write KEY=JSON", ExitCode.USAGE)
    return key, _json(value, text)
