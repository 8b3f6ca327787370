"""The command line as a whole: exit codes, errors, help, and a quick start."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import coherent_ray
from coherent_ray.cli import INTERRUPTED, main
from coherent_ray.errors import ConfigError, Fenced, StorageFull

COMMANDS = [
    "diff", "drill", "export", "ls", "pin", "prove", "prune", "receipts", "run", "save", "show",
    "stop", "submit", "unpin", "validate", "verify",
]  # fmt: skip
READERS = ["ls", "show", "verify", "receipts"]


def test_the_commands_are_these():
    assert sorted(main.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_help(call, name):
    options = {option for p in main.commands[name].params for option in p.opts}
    assert "--json" in options
    done = call(name, "--help")
    assert done.code == 0
    assert main.commands[name].help.split("\n")[0].rstrip(".") in " ".join(done.out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_is_a_whole_sentence(call, name):
    (line,) = [line for line in call("-h").out.splitlines() if line.split()[:1] == [name]]
    assert line.endswith(".")
    assert not line.endswith("...")


def test_version(call):
    assert call("--version").out.split()[-1] == coherent_ray.__version__


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["lss"],
        ["ls"],
        ["ls", "a", "b"],
        ["ls", "--no-such-option", "x"],
        ["receipts", "x", "--last", "0"],
        ["receipts", "x", "--from", "one"],
        ["validate"],
        ["submit", "x.yaml", "--follow", "--json"],
    ],
)
def test_misuse_is_exit_code_two(call, words):
    done = call(*words)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_misuse_as_json(call):
    done = call("ls", "--json")
    assert done.code == 2
    assert "Missing argument 'RUN'" in done.json["error"]["what"]
    assert done.json["error"]["exit_code"] == 2


@pytest.mark.parametrize("name", READERS)
def test_a_place_without_a_run(call, tmp_path, name):
    done = call(name, tmp_path / "nothing")
    assert done.code == 2
    assert f"{tmp_path}/nothing: no run lies here" in done.err
    assert "What to do: name the run's directory" in done.err
    assert done.out == ""
    error = call(name, tmp_path / "nothing", "--json").json["error"]
    assert error["type"] == "NotARun"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", READERS)
def test_an_address_that_is_not_supported(call, name):
    done = call(name, "hdfs://host/run")
    assert done.code == 2
    assert "hdfs is no kind of storage that this version knows" in done.err
    assert "s3://BUCKET/PREFIX" in done.err


@pytest.mark.parametrize("name", READERS)
def test_a_configuration_that_is_wrong(call, configuration, name):
    path = configuration(data={"lanes": 0})
    done = call(name, path)
    assert done.code == 2
    assert "data.lanes: must be 1 or more, not 0" in done.err


# --- how a run and a generation are named ---------------------------------------------------------


@pytest.mark.parametrize("name", ["@g1", "@1", "@g1-a1", "@latest", "@G3", "@x", "@"])
def test_a_directory_under_the_whole_text_is_meant(call, tmp_path, make_run, name):
    run = make_run(tmp_path / f"r{name}")
    run.open_attempt()
    run.publish(10)
    for command in READERS:
        assert call(command, run.root).code == 0
    make_run(tmp_path / "r").open_attempt()
    assert call("show", run.root, "--json").json["generation"] == "g1-a1"
    assert call("show", f"{run.root}@g1", "--json").json["generation"] == "g1-a1"


@pytest.mark.parametrize("command", ["show", "verify", "ls", "receipts", "prune", "pin"])
@pytest.mark.parametrize("name", ["@G3", "@g", "@x", "@", "@g1-a", "@g01", "@0", "@Latest"])
def test_what_is_no_generation_s_name_is_told_with_the_forms(call, published, command, name):
    done = call(command, f"{published.root}{name}")
    assert done.code == 2
    assert f"{name[1:]!r} is no name of a generation" in done.err
    assert "Write RUN@g12, RUN@12, RUN@g12-a3 or RUN@latest." in done.err


@pytest.mark.parametrize("name", ["@g3", "@12", "@latest", "@G3", "@x", "@"])
def test_a_generation_of_no_run_is_told_with_the_forms(call, name):
    done = call("show", name)
    assert done.code == 2
    assert "Write RUN@g12, RUN@12, RUN@g12-a3 or RUN@latest." in done.err


@pytest.mark.parametrize("command", READERS)
def test_a_file_is_no_root(call, tmp_path, configuration, command):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    below = tmp_path / "file" / "run"
    address = f"file://{tmp_path}/file"
    as_root = configuration(run={"root": str(tmp_path / "file")})
    for text in (tmp_path / "file", below, address, as_root):
        done = call(command, text)
        assert done.code == 2, (text, done.err)
        assert "ove it away" not in done.err


@pytest.fixture
def failing(monkeypatch):
    """Make a command that raises."""

    def make(error: BaseException):
        @click.command("fail")
        @click.option("--json", "as_json", is_flag=True)
        def fail(as_json: bool):
            raise error

        monkeypatch.setitem(main.commands, "fail", fail)

    return make


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageFull("no space is left", where="/run/log", remedy="free some"), 1),
        (Fenced("attempt 4 has opened", details={"attempt": 4}), 1),
        (ConfigError("it cannot be used"), 2),
    ],
)
def test_errors_of_the_tree_are_told_and_never_traced(call, failing, error, code):
    failing(error)
    done = call("fail")
    assert done.code == code
    assert done.err == f"error: {error}\n"
    as_json = call("fail", "--json")
    assert as_json.code == code
    assert as_json.err == ""
    assert as_json.json["error"] == {
        "type": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "remedy": error.remedy,
        "details": error.details,
        "exit_code": code,
    }


def test_ctrl_c(call, failing):
    failing(KeyboardInterrupt())
    done = call("fail")
    assert done.code == INTERRUPTED
    assert "interrupted" in done.err


def test_a_bug_keeps_its_traceback(failing):
    failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(main, ["fail"], catch_exceptions=False)


def test_reading_commands_load_neither_torch_nor_ray(published, configuration):
    path = configuration(run={"root": str(published.root)})
    quick = ["validate", str(path), "--settings-only"]
    program = f"""
import sys
from coherent_ray.cli import main
for words in {[*([name, str(path)] for name in READERS), quick]!r}:
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    heavy = {{"torch", "ray", "pyarrow", "numpy", "pandas"}} & set(sys.modules)
    assert not heavy, (words, heavy)
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["light"], done.stderr


def test_it_runs_as_a_module(published):
    words = [sys.executable, "-m", "coherent_ray", "ls", str(published.root), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(done.stdout)["generations"]) == 3


def test_ctrl_c_while_it_loads_is_no_error():
    program = """
import runpy, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "coherent_ray.cli.diff":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--help"]
runpy.run_module("coherent_ray", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# --- output that goes nowhere ---------------------------------------------------------------------

TELLING = [
    ["--help"],
    ["--version"],
    ["ls", "RUN"],
    ["ls", "RUN", "--json"],
    ["show", "RUN"],
    ["verify", "RUN", "--all"],
    ["receipts", "RUN", "--json"],
    ["prune", "RUN", "--dry-run"],
    ["validate", "--schema"],
    ["ls", "no-such-run", "--json"],
]


def piped(words, published, **streams):
    words = [str(published.root) if word == "RUN" else word for word in words]
    return subprocess.Popen(
        [sys.executable, "-m", "coherent_ray", *words], stderr=subprocess.PIPE, text=True, **streams
    )


@pytest.mark.parametrize("words", TELLING, ids=" ".join)
def test_output_that_finds_no_room_is_one_clear_error(published, words):
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        command = piped(words, published, stdout=full)
        _, told = command.communicate(timeout=60)
    assert command.returncode == 1
    first, *rest = told.splitlines()
    assert first == "error: the output could not be written: no space left on device"
    assert len(rest) == 1
    assert rest[0].startswith("What to do: ")


@pytest.mark.parametrize("words", TELLING, ids=" ".join)
def test_a_pipe_that_closes_is_no_news(published, words):
    command = piped(words, published, stdout=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == ""
    assert command.wait(timeout=60) == 1


def test_another_failure_of_the_operating_system_keeps_its_traceback(failing):
    failing(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        CliRunner().invoke(main, ["fail"], catch_exceptions=False)
