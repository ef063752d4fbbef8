"""The image that is built for jobs who ask for packages: what is in it, and the Dockerfile that makes it, decided without an engine.

Nothing of what a job says stands in the Dockerfile: that lies in files beside it, so there is nothing to be quoted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fluster_services.worker.environments import image_install
from fluster_services.worker.environments.environments import Needs

REPOSITORY = "fluster-environment"
KEY_LABEL = "fluster.environment"
PYTHON_LABEL = "fluster.python"
BUILDER_LABEL = "fluster.builder"  # of what is there only while something is built: <state folder>#<build>
BUILDER_ARGUMENT = "FLUSTER_BUILDER"

INSTALLER = Path(image_install.__file__).read_text(encoding="utf-8")
_NOBODY = "65534:65534"

_DOCKERFILE = """\
# What is built here is thrown away: only the environment goes into the image.
FROM {base} AS packages
ARG {builder_argument}
LABEL {builder_label}="${builder_argument}"
COPY --chown={nobody} environment {environment_folder}
COPY --chown={nobody} build {build_folder}
USER {nobody}
RUN ["python3", "-I", "{build_folder}/image_install.py"]

FROM {base}
LABEL {key_label}="{key}" {python_label}="{python_version}"
COPY --from=packages --chown=0:0 {environment_folder} {environment_folder}
ENV VIRTUAL_ENV={environment_folder} PATH={environment_folder}/bin:$PATH
"""


@dataclass(frozen=True)
class ImageRecipe:
    """All that decides what is in an image."""

    base: str  # the ID of the image below
    needs: Needs

    def key(self) -> str:
        """The same for what is the same."""
        everything = [asdict(self), _DOCKERFILE, INSTALLER]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]

    def tag(self) -> str:
        """The name by which engines know it."""
        return f"{REPOSITORY}:{self.key()}"

    def dockerfile(self, python_version: str) -> str:
        """How it is built; `python_version` is that of the Python which `needs` names in the image below."""
        return _DOCKERFILE.format(
            base=self.base,
            key=self.key(),
            python_version=python_version,
            nobody=_NOBODY,
            build_folder=image_install.HERE,
            environment_folder=image_install.ENVIRONMENT,
            builder_argument=BUILDER_ARGUMENT,
            builder_label=BUILDER_LABEL,
            key_label=KEY_LABEL,
            python_label=PYTHON_LABEL,
        )

    def installation(self) -> dict[str, object]:
        """What the program that runs in the image reads."""
        needs = self.needs
        return {
            "python": needs.python,
            "has_lock": needs.lock is not None,
            "has_requirements": bool(needs.requirements),
        }


# Those of a worker's own variables that builds get: where packages are found, and how that is reached. Nothing that changes what
# is installed, and where.
_PLACES = frozenset(
    {
        *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"),
        *("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"),
    }
)
_PASSED = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("PIP_NO_INDEX", "PIP_TRUSTED_HOST", "PIP_PROXY", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES"),
        *("UV_NO_INDEX", "UV_INSECURE_HOST", "UV_HTTP_TIMEOUT", "UV_OFFLINE"),
    }
)


def build_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What of a worker's `environment` its builds have."""
    found = {}
    for name, text in environment.items():
        is_credential = name.startswith("UV_INDEX_") and name.endswith(("_USERNAME", "_PASSWORD"))
        if name in _PLACES:  # folders of this machine are none there
            places = [place for place in text.split() if "://" in place and not place.startswith("file:")]
            found[name] = " ".join(places)
        elif name.upper() in _PASSED or is_credential:
            found[name] = text
    return {name: text for name, text in found.items() if text}


@dataclass(frozen=True)
class BuiltImage:
    """One that an engine has, and that was built for jobs."""

    tag: str
    used_at: float


def least_recently_used(images: Iterable[BuiltImage], *, spared: Iterable[str], used_before: float) -> list[str]:
    """The tags of those that may go, in this order: none that is `spared`, nor one that another worker may be about to use."""
    kept = set(spared)
    idle = [image for image in images if image.tag not in kept and image.used_at < used_before]
    return [image.tag for image in sorted(idle, key=lambda image: image.used_at)]


def is_leftover(builder: str, *, state: str, building: Iterable[str], age_s: float, others_s: float) -> bool:
    """Whether what is labelled with `builder` belongs to no build: of this worker, or of one that has not come back."""
    if builder.rpartition("#")[0] == state:
        return builder not in set(building)
    return age_s > others_s
