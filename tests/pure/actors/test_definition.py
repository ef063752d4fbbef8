from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fluster.actors import ActorContext, actor, method
from fluster.actors.definition.definition import (
    ActorKeywords,
    ActorOptions,
    MethodKeywords,
    MethodOptions,
    check_class,
    methods_of,
    name_of,
    options_of,
    resources_of,
)
from fluster.actors.deploy.deployment import job_request
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.names import near
from fluster_bus.messages import ResourceConfig


@actor
class Plain:
    """Bare decorator."""

    constant = 3

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    async def later(self, a: int) -> int:
        return a

    def told(self, ctx: Any, a: int) -> Any:
        return ctx, a

    def annotated(self, where: ActorContext) -> ActorContext:
        return where

    @staticmethod
    def static(a: int) -> int:
        return a

    @classmethod
    def of_class(cls, a: int) -> int:
        return a

    @property
    def value(self) -> int:
        raise AssertionError("a property is not looked at")

    def _private(self) -> None: ...

    class Inner: ...


@actor(name="other", max_concurrency=4, timeout=9.0, resources=ResourceConfig.with_cpu(2))
class Optioned:
    @method(timeout=3)
    def quick(self) -> None: ...

    @method
    def usual(self) -> None: ...


class Child(Optioned): ...


@actor(timeout=2.0)
class Hurried(Child): ...


@actor
class Bare(Hurried): ...


def test_public_methods_are_found_with_what_they_take() -> None:
    methods = methods_of(Plain)
    assert sorted(methods) == ["add", "annotated", "later", "of_class", "static", "told"]
    assert methods["add"].signature == "add(a: 'int', b: 'int' = 1) -> 'int'"
    assert methods["add"].doc == "Add two numbers."
    assert [name for name, info in methods.items() if info.is_async] == ["later"]
    assert [name for name, info in methods.items() if info.takes_context] == ["annotated", "told"]
    assert methods["told"].signature == "told(a: 'int') -> 'Any'"


def test_options_stand_on_the_class_and_are_inherited_but_for_the_name() -> None:
    assert resources_of(Plain) == ResourceConfig(cpu=0, memory=256 << 20)
    assert options_of(Plain).max_concurrency == 1
    assert name_of(Plain) == "Plain"
    assert name_of(Optioned) == "other"
    assert name_of(Child) == "Child"
    assert options_of(Child).max_concurrency == 4
    assert {name: info.timeout for name, info in methods_of(Child).items()} == {"quick": 3, "usual": 9.0}


@pytest.mark.parametrize("replicas", [0, -1, True, "3", 10_001])
def test_so_many_actors_can_be_deployed(replicas: Any) -> None:
    of_the_class: dict[str, Any] = {"name": None, "resources": None, "environment": None}
    with pytest.raises(ValueError, match=f"replicas={replicas!r}: give the number of actors, from 1 to 10,000"):
        job_request(Plain, (), {}, replicas=replicas, **of_the_class)
    assert job_request(Plain, (), {}, replicas=3, **of_the_class).replicas == 3


def test_what_a_subclass_does_not_say_it_inherits() -> None:
    for cls in (Hurried, Bare):
        options = options_of(cls)
        assert (options.timeout, options.max_concurrency, resources_of(cls).cpu) == (2.0, 4, 2)
        assert name_of(cls) == cls.__name__
    assert options_of(Optioned).timeout == 9.0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_concurency": 2}, TypeError, "no option 'max_concurency'; did you mean 'max_concurrency'"),
        ({"durable": 1}, TypeError, "durable=1: give True or False"),
        ({"singleton": "yes"}, TypeError, "singleton='yes': give True or False"),
        (
            {"durable": True, "max_concurrency": 2},
            ValueError,
            "durable=True with max_concurrency=2: its calls are handled",
        ),
        ({"durable": True, "concurrency_groups": {"io": 1}}, ValueError, "durable=True with concurrency_groups"),
        ({"durable": True, "codec": "json"}, ValueError, "durable=True with codec='json': stored calls are pickled"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency=0: give a number from 1"),
        ({"timeout": -1}, ValueError, "timeout=-1: give a number of seconds above 0"),
        ({"timeout": "3"}, TypeError, "timeout='3': give seconds as a number"),
        ({"resources": 3}, TypeError, "resources=3: give a ResourceConfig"),
        ({"mailbox_calls": 0}, ValueError, "mailbox_calls=0"),
        ({"name": "a.b"}, InvalidNameError, "invalid actor name 'a.b'"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        actor(**options)


def test_type_checkers_know_each_option_by_the_type_of_its_field() -> None:
    for keywords, options in ((ActorKeywords, ActorOptions), (MethodKeywords, MethodOptions)):
        fields = {field.name: field.type for field in dataclasses.fields(options)}
        # As written: what the annotations name may be imported for type checkers alone.
        assert {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()} == fields


def test_decorators_stand_where_they_belong() -> None:
    with pytest.raises(TypeError, match="@actor stands above a class"):
        actor(lambda: 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="@method has no option 'retrys'"):
        method(retrys=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="leading underscore"):

        @method
        def _hidden() -> None: ...


def test_only_classes_are_deployed() -> None:
    assert check_class(Plain) is Plain
    with pytest.raises(TypeError, match=r"write deploy\(cluster, Plain, …\)"):
        check_class(Plain())
    with pytest.raises(TypeError, match="use a WorkerPool to run functions"):
        check_class(near)


def test_near_names() -> None:
    assert near("ad", ["add", "subtract"]) == "; did you mean 'add'?"
    assert near("zzz", ["b", "a"]) == "; there is a, b"
    assert near("zzz", []) == ""


def test_a_context_knows_its_job() -> None:
    assert ActorContext.from_environment({"FLUSTER_NAMESPACE": "team"}) == ActorContext(namespace="team")  # type: ignore[arg-type]
    environment = {
        "FLUSTER_JOB_ID": "train-1",
        "FLUSTER_TASK_INDEX": "2",
        "FLUSTER_NUM_TASKS": "4",
        "FLUSTER_ATTEMPT": "3",
        "FLUSTER_WORKER_ID": "w1",
        "FLUSTER_NAMESPACE": "team",
    }
    context = ActorContext.from_environment(environment)
    assert (context.job_id, context.task, context.num_tasks, context.attempt) == ("train-1", 2, 4, 3)
    assert context.worker_id == "w1"


def test_a_durable_actor_is_a_singleton_and_may_not_have_everything() -> None:
    @actor(durable=True)
    class Reader:
        def read(self) -> Any:
            yield 1

    @actor(durable=True)
    class Trier:
        @method(retries=1)
        def run(self) -> None: ...

    assert options_of(Reader).has_seat
    assert not options_of(Plain).has_seat
    with pytest.raises(ValueError, match=r"Reader\.read is a generator, and its class is durable.*return a list"):
        methods_of(Reader)
    with pytest.raises(ValueError, match=r"Trier\.run has retries=1, and its class is durable"):
        methods_of(Trier)
