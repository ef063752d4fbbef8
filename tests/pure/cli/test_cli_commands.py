"""What the command line takes, without a cluster."""

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fluster.cli.app import app, commands_for, main
from fluster.cli.clusters import stop_signals
from fluster.cli.common.exit_codes import CommandError, ExitCode
from fluster.cli.common.job_options import make_request, make_resources, name_of, variables_option
from fluster_bus.access.address import BusAddress
from fluster_bus.messages import GpuConfig
from tests.missed_signals import missed_signal

COMMANDS = [
    *("demo", "up", "local", "credentials", "token", "namespace", "controller", "backup", "workers", "nodes", "worker"),
    *("submit", "ps", "status", "explain", "stack", "logs", "result", "cancel"),
    *("deploy", "actors", "actor", "call"),
]


def _help(*arguments: str, of: typer.Typer = app) -> str:
    result = CliRunner().invoke(of, [*arguments, "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert result.exit_code == 0
    return result.output


def test_the_help_names_every_command_and_the_exit_codes() -> None:
    text = _help()
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", text, re.MULTILINE), command
    assert "Exit codes" in text


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in {"workers", "worker", "controller"}]
)
def test_the_help_of_a_command_has_something_to_try(command: str) -> None:
    assert f"fluster {command}" in _help(command).split("Try:")[1]


_ALL = [
    (),
    *((command,) for command in COMMANDS),
    *(("worker", verb) for verb in ("start", "health", "list", "status", "logs", "kill", "drain")),
    *(("credentials", verb) for verb in ("init", "add", "revoke", "ls", "push", "passwords")),
    *(("token", verb) for verb in ("create", "ls", "revoke", "keys")),
    ("controller", "start"),
]


def _shown_help(
    words: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the program itself shows, rather than the commands it is made of."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["fluster", *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.OK
    return capsys.readouterr().out


@pytest.mark.parametrize("words", _ALL, ids=" ".join)
def test_the_help_speaks_to_people(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _shown_help(words, 100, monkeypatch, capsys)
    about, options = text.split("╭", 1)
    assert re.findall(r"<(?:str|int|float|list|bool|path|[a-z ]*range)\b|x[<>]=|<=x|0000\.0|\[/?none\]", text) == []
    assert re.findall(r"\b(?:whoever|nobody|somebody|shall)\b", text) == []
    assert re.findall(r" Example: [^│]* (?:From|At least) ", options) == []
    for example in re.findall(r"^ *(?:job=\$\()?fluster .*", about.partition("Try:")[2], re.MULTILINE):
        assert example.startswith("   "), "it stands out from the text"


def test_paragraphs_of_the_help_fill_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (80, 100, 130):
        for command in ("submit", "up", "result", "stack"):
            about = _shown_help((command,), columns, monkeypatch, capsys).split("Try:")[0]
            for paragraph in about.split("Usage:")[1].split("\n \n")[0].strip().split("\n" + " " * columns + "\n"):
                lines = [line.strip() for line in paragraph.splitlines()]
                for line, following in itertools.pairwise(lines):
                    assert len(line) + 1 + len(following.split()[0]) > columns - 2, (line, following)


@pytest.mark.parametrize(
    ("words", "columns"),
    [*((words, 40) for words in _ALL), *(((command,), 79) for command in ("submit", "up", "namespace"))],
)
def test_in_a_narrow_terminal_nothing_is_cut(
    words: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide, narrow = (_shown_help(words, each, monkeypatch, capsys) for each in (300, columns))
    assert [line for line in narrow.splitlines() if len(line) > columns and " " in line.strip()] == []
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", wide))
    assert options - set(re.findall(r"(?<![\w-])--[a-z-]+", narrow)) == set()

    def said(text: str) -> set[str]:
        return set(re.sub(r"[╭╮╰╯─│*,;\[\]]|env var:|default:", " ", text).split())

    assert said(wide) - said(narrow) <= {"Arguments", "Options", "Commands", "Clusters", "Workers", "Jobs", "Actors"}


def test_clusters_of_this_machine_are_listed_without_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _shown_help(("local",), 100, monkeypatch, capsys)
    assert re.findall(r"│ (--[a-z-]+)", shown) == ["--stop", "--stop-all", "--output", "--help"]


def test_ranges_are_checked_though_the_help_has_words_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(_shown_help(("ps",), 200, monkeypatch, capsys).split())
    assert "--limit N At most so many, the newest first. From 1 to 10,000. [default: 100]" in shown
    monkeypatch.setattr(sys, "argv", ["fluster", "ps", "--limit", "10001"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("fluster: --limit='10001': it must be less than or equal to 10000 ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_the_same_when_it_alone_is_made(command: str) -> None:
    alone = commands_for([command, "--help"])
    assert len(alone.registered_commands) + len(alone.registered_groups) == 1
    assert _help(command, of=alone) == _help(command)


@pytest.mark.parametrize("words", [[], ["--help"], ["--address", "submit", "ps"], ["nonsense"]])
def test_all_commands_are_made_where_the_first_word_is_none(words: list[str]) -> None:
    assert commands_for(words) is app


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = "from fluster.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, env=variables
    )


def test_wrong_usage_ends_with_2() -> None:
    for arguments in (["ps", "--limit", "0"], ["nonsense"], ["status"], ["ps", "--output", "xml"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2, arguments


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["submit", "--cpu", "x", "--", "true"], "--cpu='x': it must be a valid number (`fluster submit --help`)"),
        (["submit", "--retries", "-2", "--", "true"], "--retries='-2': it must be greater than or equal to 0 (`flus"),
        (["submit", "--retries", "1.5", "--", "true"], "--retries='1.5': it must be a valid integer (`fluster submit"),
        (["submit", "--output", "xml", "--", "true"], "--output: 'xml' is not one of 'table', 'json' (`fluster sub"),
        (
            ["submit", "--retris", "2", "--", "true"],
            "no such option: --retris; did you mean '--retries'? (`fluster submit --help`)",
        ),
        (["submit", "--wait=3", "--", "true"], "option '--wait' does not take a value (`fluster --help`)"),
        (["logs", "train-3f2a", "--grep", "("], "--grep: invalid regular expression '(': missing ), unterminated"),
        (["logs", "a", "b"], "got unexpected extra argument(s) (b) (`fluster logs --help`)"),
        (["status"], "missing argument 'ID' (`fluster status --help`)"),
        (["sumbit"], "no such command 'sumbit'. Did you mean 'submit'? (`fluster --help`)"),
        (["worker", "nonsense"], "no such command 'nonsense' (`fluster worker --help`)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_in_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fluster", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.USAGE
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"fluster: {line}")


def test_without_a_command_it_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fluster"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.USAGE
    shown = capsys.readouterr()
    assert "Exit codes" in shown.out + shown.err
    assert "fluster: " not in shown.err


def test_ctrl_c_ends_it_without_a_traceback_also_while_it_imports() -> None:
    script = """
import sys
class Pressed:
    def find_spec(self, name, *_more):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
from fluster.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_it_works_without_standard_streams(tmp_path: Path) -> None:
    script = "from fluster.cli import main; main()"
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run([*shell, "credentials", "passwords", str(tmp_path)], check=False).returncode == 0
    assert subprocess.run([*shell, "--version"], check=False).returncode == 0
    assert subprocess.run([*shell, "nonsense"], check=False).returncode == 2


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package' ("),
        ("x = 1\nprint(y)", "NameError: name 'y' is not defined ("),
        ("def f(:", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_no_error_in_fluster(
    source: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_counters.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(app, ["deploy", "broken_counters:Counter"])
    assert done.exit_code == ExitCode.FAILED
    said = f"fluster: broken_counters:Counter: broken_counters cannot be imported: {line}"
    assert done.stderr.startswith(said), done.stderr
    assert f"broken_counters.py, line {1 + source.count(chr(10))}" in done.stderr


def test_folders_are_for_workers_in_containers_and_not_the_systems_own() -> None:
    for arguments, why in (
        (["--folder", "/srv"], "is for --backend docker"),
        (["--folder", "/etc", "--backend", "docker"], "folders has '/etc'"),
    ):
        refused = CliRunner().invoke(app, ["up", *arguments])
        assert (refused.exit_code, why in refused.stderr) == (ExitCode.USAGE, True), refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(["logs", "train-3f2a", "--since", seconds] for seconds in ("nan", "inf", "-1", "1e12")),
        ["worker", "logs", "w1", "train-3f2a", "--since", "nan"],
        ["worker", "drain", "w1", "--timeout", "inf"],
        ["call", "counter", "add", "--timeout", "nan"],
        ["logs", "train-3f2a", "--grep", "("],
        ["worker", "logs", "w1", "train-3f2a", "--grep", "("],
    ],
    ids=" ".join,
)
def test_seconds_and_patterns_are_checked_before_anybody_is_asked(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert arguments[-2] in done.output


def test_credentials_are_written_and_their_files_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["credentials", "passwords", str(tmp_path), "--namespace", "a", "--url", "tls://bus"]
    )
    assert done.exit_code == 0
    users = ("service", "worker", "gateway", "autoscaler", "operator", "client_a", "job_a")
    names = ["passwords.env", *(f"{user}.json" for user in users), "servers/nats"]
    assert done.output.splitlines() == [str(tmp_path / name) for name in names]
    assert BusAddress.parse(str(tmp_path / "client_a.json")).url == "tls://bus:4222"


def test_signed_credentials_are_made_listed_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["credentials", *words])
        return done.exit_code, done.stdout, done.stderr

    code, _, said = run("add", "operator", "me")
    assert (code, "no keys of a cluster are in the folder authority: " in said) == (ExitCode.USAGE, True)
    assert run("init", "--url", "nats://bus:4000")[:2] == (0, "authority/nats-server.conf\n")
    keys = {file: file.read_text() for file in tmp_path.glob("authority/*.seed")}
    assert {file.stat().st_mode & 0o777 for file in keys} == {0o600}
    configuration = (tmp_path / "authority/nats-server.conf").read_text()
    assert 'listen: "0.0.0.0:4000"' in configuration
    assert not any(seed.strip() in configuration for seed in keys.values())
    assert run("add", "client", "alice", "--namespace", "a,b", "--until", "30d")[:2] == (0, "alice.creds\n")
    assert (tmp_path / "alice.creds").stat().st_mode & 0o777 == 0o600
    address = BusAddress.parse("alice.creds")
    assert (address.url, address.user, address.namespaces) == ("nats://bus:4000", "alice", ("a", "b"))
    for words, why in (
        (("client", "alice", "--namespace", "a"), "the file alice.creds exists already"),
        (("client", "alice", "--namespace", "a", "--file", "other.creds"), "the user 'alice' exists already"),
        (("client", "bob"), "name one at least"),
        (("job", "j", "--namespace", "a,b"), "jobs are of one namespace"),
        (("service", "c", "--namespace", "a"), "of the whole cluster"),
        (("client", "bob", "--namespace", "a", "--until", "2001-01-01"), "--until='2001-01-01': "),
        (("client", "bob", "--namespace", "a", "--until", "soon"), "--until='soon': give a date such as"),
        (("client", "b.b", "--namespace", "a"), "invalid user 'b.b'"),
    ):
        code, _, said = run("add", *words)
        assert (code != 0, why in said) == (True, True), said
    monkeypatch.setenv("FLUSTER_AUTHORITY", str(tmp_path / "authority"))
    columns = run("ls")[1].splitlines()[1].split()
    assert columns[:4] == ["alice", "client", "a,b", "good"]
    assert "unknown user 'bob': the users are alice" in run("revoke", "bob")[2]
    assert run("init")[0] == 0
    assert {file: file.read_text() for file in keys} == keys


def test_without_a_cluster_it_tells_what_to_set(tmp_path: Path) -> None:
    done = _run("ps", "--output", "json", FLUSTER_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert "FLUSTER_CLUSTER_ADDRESS is not set" in line
    assert "fluster up" in line


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py"], "python"),
        (["/usr/bin/env", "x"], "env"),
        (["./my script.sh"], "my-script-sh"),
        (["…"], "job"),
        (["x" * 300], "x" * 40),
    ],
)
def test_a_job_is_named_after_its_program(command: list[str], name: str) -> None:
    assert name_of(command) == name


@pytest.mark.parametrize(
    ("text", "variant", "count"),
    [("h100:8", "h100", 8), ("h100", "h100", 1), ("8", "any", 8), ("rtx-4090", "rtx-4090", 1)],
)
def test_gpus(text: str, variant: str, count: int) -> None:
    assert make_resources(1, "1GiB", text).device == GpuConfig(variant=variant, count=count)


@pytest.mark.parametrize(("gpu", "memory"), [("h100:many", "1GiB"), ("h100:", "1GiB"), (None, "lots")])
def test_resources_that_are_none_are_quoted(gpu: str | None, memory: str) -> None:
    with pytest.raises(CommandError, match=re.escape(str(gpu if gpu is not None else memory))):
        make_resources(1, memory, gpu)


def test_an_assignment_needs_a_name_and_a_value() -> None:
    assert variables_option([], ["A=b=c", "E="]) == {"A": "b=c", "E": ""}
    for wrong in ("A", "=b"):
        with pytest.raises(CommandError, match=re.escape(wrong)):
            variables_option([], [wrong])


def test_variables_come_from_files_and_go_before_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT", "here")
    monkeypatch.delenv("ABSENT", raising=False)
    file = tmp_path / ".env"
    file.write_text("# for training\n\nA=1\nexport B = 'two words'\nC=x # y\nPRESENT\nABSENT\nD=\n")
    expected = {"A": "0", "B": "two words", "C": "x # y", "PRESENT": "here", "D": ""}
    assert variables_option([file], ["A=0"]) == expected
    file.write_text("A=1\nno name here\n")
    with pytest.raises(CommandError, match=r"\.env, line 2: write NAME=VALUE"):
        variables_option([file], [])


def test_every_option_of_submit_shows_an_example() -> None:
    command: Any = typer.main.get_command(app)
    options = [each for each in command.commands["submit"].params if each.param_type_name == "option"]
    without = [each.name for each in options if f"Example: --{each.name.replace('_', '-')}" not in (each.help or "")]
    assert without == []


def test_what_a_job_cannot_be_is_told_by_its_option() -> None:
    for fields, message in (
        ({"timeout_s": 0}, "--timeout: it must be greater than 0"),
        ({"array": "9-0"}, "invalid array 9-0"),
        ({"array": "0-9%0"}, "invalid array '0-9%0': expected FIRST-LAST"),
        ({"array": "0-9:0"}, "invalid array '0-9:0': expected FIRST-LAST"),
        ({"array": "x"}, "--array: invalid array 'x': expected FIRST-LAST"),
        ({"array": "0-9", "replicas": 3}, "--array 0-9 has 10 tasks: leave --replicas 3 out"),
        ({"array": "1", "replicas": 3}, "--array 1-1 has 1 task: leave --replicas 3 out"),
        ({"array": "0-9", "gang": True}, "--array 0-9 and --gang exclude each other"),
    ):
        with pytest.raises(CommandError, match=re.escape(message.removeprefix("--array: "))):
            make_request(["true"], **fields)


def test_the_page_about_the_command_line_names_every_command_and_exit_code() -> None:
    page = (Path(__file__).parents[3] / "docs/command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `fluster (\w+)", page, re.MULTILINE) == COMMANDS
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == list(ExitCode)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_cluster_that_is_up_sees_its_end_also_just_before_it_waits_for_it(number: signal.Signals) -> None:
    with stop_signals() as ends:
        ends.is_up = True
        with missed_signal(number):
            assert ends.wait() == number
