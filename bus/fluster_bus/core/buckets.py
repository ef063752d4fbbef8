"""Every stream and bucket of Fluster, and the keys in them, are named here, and nowhere else.

The comment at each function shows the finished string. Names are checked, as in subjects.
"""

from __future__ import annotations

from fluster_bus.core.names import check_name, check_namespace
from fluster_bus.core.subjects import ANY_TAIL, ANY_TOKEN, OWN_NAMESPACE, checked_token


def _one_ns(namespace: str) -> str:
    return namespace if namespace == OWN_NAMESPACE else check_namespace(namespace)


# ---- streams and buckets ----------------------------------------------------------------------------------------------

SUBMIT_STREAM = "FLUSTER_SUBMIT"
SUBMIT_CONSUMER = "controller"
# By which a controller tries how much room servers have; nothing is ever written there.
ROOM_STREAM = "FLUSTER_ROOM"
WORKERS_BUCKET = "fluster_workers"
CONTROLLERS_BUCKET = "fluster_controllers"
JOINS_BUCKET = "fluster_joins"
NAMESPACES_BUCKET = "fluster_namespaces"


def jobs_bucket(namespace: str) -> str:
    return f"fluster_jobs_{_one_ns(namespace)}"


def endpoints_bucket(namespace: str) -> str:
    return f"fluster_endpoints_{_one_ns(namespace)}"


def actors_bucket(namespace: str) -> str:
    return f"fluster_actors_{_one_ns(namespace)}"


def calls_stream(namespace: str) -> str:
    return f"FLUSTER_CALLS_{_one_ns(namespace)}"


def events_stream(namespace: str) -> str:
    return f"FLUSTER_EVENTS_{_one_ns(namespace)}"


def logs_stream(namespace: str) -> str:
    return f"FLUSTER_LOGS_{_one_ns(namespace)}"


def objects_stream(kind: str, namespace: str) -> str:
    return f"FLUSTER_{check_name('kind', kind).upper()}_{_one_ns(namespace)}"  # FLUSTER_BUNDLES_default


def results_stream(namespace: str) -> str:
    return f"FLUSTER_RESULTS_{_one_ns(namespace)}"


def secrets_stream(namespace: str) -> str:
    return f"FLUSTER_SECRETS_{_one_ns(namespace)}"


def bucket_stream(bucket: str) -> str:
    return f"KV_{bucket}"


def bucket_key(bucket: str, key: str = ANY_TAIL) -> str:
    return f"$KV.{bucket}.{key}"


def key_of(bucket: str, subject: str) -> str:
    return subject.removeprefix(f"$KV.{bucket}.")


# ---- keys -------------------------------------------------------------------------------------------------------------

# Who leads, in CONTROLLERS_BUCKET and in every bucket of jobs. No job can have that id.
LEADER_KEY = "leader"
# In every bucket of jobs: a message under it stands before each batch of verdicts, and voids it when another leads.
VERDICTS_KEY = f"{LEADER_KEY}.verdicts.batch"  # three tokens: no key of a task, so workers may not write it
# In JOINS_BUCKET: the names of workers that were given credentials in another way than by a token.
ISSUED_WORKERS_KEY = "issued"


def join_token_key(token: str) -> str:
    return f"token.{checked_token('join token', token)}"  # token.join-3f2a9c1b


def joined_worker_key(worker: str) -> str:
    return f"worker.{checked_token('worker', worker)}"  # worker.w1


def seat_key(name: str) -> str:
    """Who is the one instance of an actor, in the bucket of actors."""
    return f"seat.{check_name('actor', name)}"  # seat.ledger


def seat_key_of_any() -> str:
    return f"seat.{ANY_TAIL}"


def handled_key(name: str) -> str:
    """How far a durable actor's calls are handled."""
    return f"handled.{check_name('actor', name)}"  # handled.ledger


def state_key(name: str) -> str:
    """What a durable actor has saved."""
    return f"state.{check_name('actor', name)}"  # state.ledger


def task_key(job: str, task: int) -> str:
    return f"{check_name('job', job)}.{task}"  # train-1.0


def task_key_of_any(job: str) -> str:
    """The keys of all tasks of a job."""
    return f"{check_name('job', job)}.{ANY_TOKEN}"  # train-1.*


def is_task_key(key: str) -> bool:
    return "." in key


def is_record_key(key: str) -> bool:
    """True for the key of a job's or a task's record, in a bucket of jobs."""
    return key not in (LEADER_KEY, VERDICTS_KEY)


def attempt_key(namespace: str, job: str, task: int, attempt: int) -> str:
    return f"{namespace}.{task_key(job, task)}.{attempt}"  # default.train-1.0.1


def endpoints_of_attempt(job: str, task: int, attempt: int) -> str:
    """The keys of all endpoints that an attempt registered, whatever their names."""
    return f"{ANY_TOKEN}.{task_key(job, task)}.{attempt}.{ANY_TOKEN}"


NO_JOB = "-"  # in a key, for a server outside of any job


def endpoint_key(name: str, job: str, task: int, attempt: int, endpoint: str) -> str:
    # calculator.train-1.0.1.5f2c…; a server outside of any job has `-` for its job
    job, endpoint = check_name("job", job), check_name("endpoint id", endpoint)
    return f"{check_name('endpoint name', name)}.{job}.{task}.{attempt}.{endpoint}"


def endpoints_named(name: str) -> str:
    """The keys of all endpoints of one name."""
    return f"{check_name('endpoint name', name)}.{ANY_TAIL}"


def endpoints_with_id(endpoint: str) -> str:
    """The keys of the endpoint of that id, whatever its name."""
    return ".".join([*[ANY_TOKEN] * 4, check_name("endpoint id", endpoint)])
