"""The image that container tests run: Debian's smallest, with the Python that runs the tests. Made once, kept by what is in it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SUITE = "bookworm"
_PACKAGES = "ca-certificates,python3,python3-venv"
_FORMAT = 2  # changed when the same inputs make something else
_LEFT_OUT_OF_ROOT = (
    "./usr/share/doc",
    "./usr/share/locale",
    "./usr/share/man",
    "./var/cache/apt",
    "./var/lib/apt/lists",
)
_LEFT_OUT_OF_PYTHON = ("test", "tests", "idlelib", "config-3*", "*.a", "site-packages")


class ImageError(RuntimeError):
    """The image cannot be made here."""


def image_name() -> str:
    """The name under which engines know the image."""
    return f"fluster-test:{_key()}"


def _key() -> str:
    recipe = [_FORMAT, _SUITE, _PACKAGES, sys.base_prefix, sys.version]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Where tests keep what takes long to make."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluster-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def root_tar() -> Path:
    """The image's files as a tar, made unless it is there: a minute or so. Raises ImageError."""
    cache = cache_folder()
    made = cache / f"docker-{_key()}.tar"
    with (cache / "docker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in cache.glob("docker-*.tar"):
                old.unlink()
            _make(made)
    return made


def _make(made: Path) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise ImageError("its image is made by debootstrap as root (Debian: package debootstrap)")
    scratch = Path(tempfile.mkdtemp(prefix="fluster-image-"))
    try:
        root = scratch / "root"
        _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root))
        if sys.base_prefix != "/usr":  # as the official Python images have it
            _copy_python(root / "usr/local")
            _run("ldconfig", "-r", str(root))
        draft = scratch / "root.tar"
        left_out = [f"--exclude={path}" for path in _LEFT_OUT_OF_ROOT]
        _run("tar", "-C", str(root), *left_out, "-cf", str(draft), ".")
        shutil.move(draft, made)
    finally:
        shutil.rmtree(scratch)


def _copy_python(target: Path) -> None:
    left_out = shutil.ignore_patterns(*_LEFT_OUT_OF_PYTHON)
    for folder in ("bin", "lib"):
        shutil.copytree(
            Path(sys.base_prefix) / folder, target / folder, symlinks=True, dirs_exist_ok=True, ignore=left_out
        )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{command[0]} failed: {(done.stderr or done.stdout)[-2_000:]}")
