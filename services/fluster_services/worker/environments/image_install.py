"""Installs what a job asks for in the image that is built for it: run there, alone, by whatever Python the image has (3.7 or newer).

python3 image_install.py              installs into ENVIRONMENT what recipe.json beside it says
python3 -c <this file> look [NAME]    prints the version of the Python that NAME means there
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

HERE = "/opt/fluster-build"
ENVIRONMENT = "/opt/fluster-environment"
REQUIREMENTS = "fluster-requirements.txt"
_PYTHON = f"{ENVIRONMENT}/bin/python3"


def find_python(name: str | None) -> str:
    """The path of the interpreter that `name` means, a version, a program or a path; without a name, of this one."""
    found = sys.executable if name is None else shutil.which(name) or shutil.which(f"python{name}")
    if not found:
        sys.exit(f"no Python {name!r} is found there")
    return found


def look(name: str | None) -> None:
    """Print the version of a Python, such as 3.12."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    subprocess.run([find_python(name), "-I", "-c", program], check=True)


def install(recipe: dict[str, object]) -> None:
    """Fill the environment; run by the interpreter that it is for."""
    make_environment()
    if recipe["has_lock"]:
        options = ["--frozen", "--no-dev", "--no-install-project", "--no-editable", "--no-cache", "--python", _PYTHON]
        run(f"{HERE}/uv", "sync", *options)
    if recipe["has_requirements"]:
        run(*find_pip(), "install", "--requirement", REQUIREMENTS)


def make_environment() -> None:
    """One that sees what the image has, which so need not be installed again."""
    options = ["--without-pip", "--system-site-packages"]
    subprocess.run([sys.executable, "-I", "-m", "venv", *options, ENVIRONMENT], check=True)
    if sys.prefix != sys.base_prefix:  # this Python is an environment itself: its packages are not the system's
        major, minor = sys.version_info[:2]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("/site-packages")]
        place = Path(f"{ENVIRONMENT}/lib/python{major}.{minor}/site-packages/zz_fluster.pth")
        place.write_text("".join(lines), encoding="utf-8")


def find_pip() -> list[str]:
    """The command that runs pip: the image's own, else the one that Python brings along."""
    has_pip = subprocess.run([_PYTHON, "-I", "-c", "import pip"], check=False, stderr=subprocess.DEVNULL)
    if has_pip.returncode == 0:
        return [_PYTHON, "-I", "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    places = [Path(spec.origin).parent / "_bundled"] if spec is not None and spec.origin is not None else []
    for place in [*places, Path("/usr/share/python-wheels")]:
        for wheel in place.glob("pip-*.whl"):
            return [_PYTHON, "-I", f"{wheel}/pip"]
    sys.exit("the image has no pip to install packages with (Debian: package python3-venv or python3-pip)")


def run(*command: str) -> None:
    """Run what installs, in the workspace, or end as it does."""
    shown = " ".join([Path(command[0]).name, *command[1:]])
    sys.stdout.write(f"$ {shown}\n")
    sys.stdout.flush()
    try:
        done = subprocess.run(command, check=False, cwd=f"{HERE}/workspace", env={**os.environ, **variables()})
    except OSError as error:  # uv was made for another C library
        sys.exit(f"{command[0]} does not run in the image ({error}): take one with glibc, such as Debian's")
    if done.returncode:
        sys.exit(done.returncode)


def variables() -> dict[str, str]:
    """What pip and uv read in their environment."""
    given: dict[str, str] = json.loads(Path(HERE, "settings.json").read_text(encoding="utf-8"))
    if Path(HERE, "ca.pem").exists():
        given.update(dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), trusted()))
    return {
        **given,
        "HOME": "/tmp",  # noqa: S108 - of a container that is thrown away
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "UV_PROJECT_ENVIRONMENT": ENVIRONMENT,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
    }


def trusted() -> str:
    """The path of a file with the certificates that the image trusts, and those that its builds are given beside."""
    own = ssl.get_default_verify_paths().cafile
    texts = [Path(path).read_text(encoding="utf-8") for path in (own, f"{HERE}/ca.pem") if path is not None]
    both = Path(HERE, "both.pem")
    both.write_text("\n".join(texts), encoding="utf-8")
    return str(both)


def main() -> None:
    if sys.argv[1:2] == ["look"]:
        look(sys.argv[2] if len(sys.argv) > 2 else None)
        return
    recipe = json.loads(Path(HERE, "recipe.json").read_text(encoding="utf-8"))
    if recipe["python"] is not None and sys.argv[1:] != ["found"]:
        found = find_python(recipe["python"])
        os.execv(found, [found, "-I", __file__, "found"])
    install(recipe)


if __name__ == "__main__":
    main()
