"""The image that an attempt has run in, as more than a tag, which may be moved to another one."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from fluster_bus.messages.parts.model import Message

_DIGEST = r"\Asha256:[0-9a-f]{64}\z"


class UsedImage(Message):
    """An image as one engine had it."""

    name: str = Field(max_length=1_024)
    """As the job or the worker named it."""
    id: str = Field(pattern=_DIGEST)
    """What it is made of, to engines: the same image has it wherever it came from."""
    digest: str | None = Field(default=None, pattern=_DIGEST)
    """By which its registry knows it; None: it is of none."""

    def __str__(self) -> str:
        if self.digest is None or "@" in self.name:
            return self.name if "@" in self.name else f"{self.name} ({self.id})"
        return f"{self.name}@{self.digest}"

    @property
    def exact(self) -> str | None:
        """The name by which engines pull the same image again."""
        return None if self.digest is None else f"{split_name(self.name)[0]}@{self.digest}"

    def is_same(self, other: UsedImage) -> bool:
        """Whether both are one image."""
        return self.id == other.id or (self.digest is not None and self.digest == other.digest)


def split_name(name: str) -> tuple[str, str]:
    """The repository, and the digest or else the tag: a tag before a digest says nothing."""
    name, _, digest = name.partition("@")
    head, slash, tail = name.rpartition("/")
    last, _, tag = tail.partition(":")
    return f"{head}{slash}{last}", digest or tag or "latest"


def engine_name(name: str) -> str:
    """The name as engines take it."""
    repository, version = split_name(name)
    return f"{repository}@{version}" if "@" in name else name


def digest_of(name: str, known: Iterable[str]) -> str | None:
    """The digest in the registry of `name`, among those that an engine knows of an image (`repository@sha256:…`)."""
    repository = _in_full(split_name(name)[0])
    found = [each.partition("@") for each in known]
    digests = [digest for own, _, digest in found if _in_full(own) == repository]
    wanted = split_name(name)[1]
    return wanted if wanted in digests else next(iter(digests), None)


def _in_full(repository: str) -> str:
    """With the registry that is meant where none is named."""
    for short in ("docker.io/", "index.docker.io/", "library/"):
        repository = repository.removeprefix(short)
    return repository
