"""What deepspeed's runner is given to start ranks on other hosts over ssh, and what comes of it there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import environment, need

from lockstep.cli import app
from lockstep.comm.errors import UsageError
from lockstep.comm.launchers import Plan, command, hosts_of

ODD = [
    "a b",
    "it's",
    "",
    "$HOME",
    "a $HOME `id` \\",
    '\\"',
    '"a \\" b"',
    "100%",
    "%h %n%%",
    "a;b|c>d&",
    "a\nb",
    "*",
    "~",
]


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("host-0 slots=1\nhost-1 slots=1\n")
    return file


def far(hostfile: Path, *arguments: str) -> list[str]:
    """What follows `-- --quiet`: the command of each rank, as the runner is given it."""
    argv = command(Plan("deepspeed", 2, arguments, hosts_of(2, hostfile, None))).argv
    dashes = argv.index("--")
    assert argv[dashes + 1] == "--quiet"
    return list(argv[dashes + 2 :])


def through_runner_pdsh_and_shell(words: list[str]) -> list[str]:
    """As deepspeed.launcher.multinode_runner.PDSHRunner and pdsh treat them; then the shell prints what it has read."""
    quoted = ['"{}"'.format(word.replace('"', '\\"')) if " " in word else word for word in words]
    line = " ".join(quoted).replace("%%", "%")
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    read = subprocess.run(["sh", "-c", f'"$0" "$1" "$2" {line}', *show], capture_output=True, text=True, check=True)
    words = json.loads(read.stdout)
    return words


def test_every_argument_reaches_the_rank_as_it_was_given(hostfile: Path) -> None:
    assert through_runner_pdsh_and_shell(far(hostfile, *ODD))[-len(ODD) :] == ODD


def test_settings_of_this_host_reach_the_ranks(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "HOME"):
        monkeypatch.setenv(name, f"a '{name}'")
    words = through_runner_pdsh_and_shell(far(hostfile, "generate"))
    assert words[0] == "env"
    assert words[-5:] == [sys.executable, "-u", "-m", "lockstep.cli", "generate"]
    settings = words[1:-5]
    assert {"OMP_NUM_THREADS=a 'OMP_NUM_THREADS'", "GLOO_SOCKET_IFNAME=a 'GLOO_SOCKET_IFNAME'"} <= set(settings)
    assert not [setting for setting in settings if setting.startswith(("CUDA_", "HOME"))]


def test_two_runs_from_their_first_host_get_two_ports(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> str:
        argv = command(Plan("deepspeed", 2, (), hosts_of(2, hostfile, None))).argv
        return argv[argv.index("--master_port") + 1]

    assert port() == port() == "29500"
    monkeypatch.setattr("socket.gethostname", lambda: "host-0")
    assert len({port(), port(), "29500"}) == 3


def test_a_folder_that_no_shell_would_find_is_refused(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my work").mkdir()
    monkeypatch.chdir(tmp_path / "my work")
    with pytest.raises(UsageError, match=r"cannot go to '.*my work' on other hosts; use a path of plain letters"):
        far(hostfile, "generate")


def test_without_pdsh_it_says_so(
    hostfile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("deepspeed")
    monkeypatch.setenv("PATH", "")
    launch = ["launch", "--launcher", "deepspeed", "--hostfile", str(hostfile)]
    assert app.main([*launch, "--", "generate", "demo", "--tp", "2"]) == 2
    assert (
        "needs pdsh to reach other hosts; install it, or run this on each, with --node-rank" in capsys.readouterr().err
    )


def test_ctrl_c_is_130_whatever_the_launcher_says() -> None:
    script = "trap 'exit 1' INT; kill -INT $PPID; for i in $(seq 100); do sleep 0.1; done"
    launch = "import sys; from lockstep.cli import launcher; from lockstep.comm.launchers import Command"
    line = [sys.executable, "-c", f"{launch}; sys.exit(launcher.run(Command(('sh', '-c', sys.argv[1]))))", script]
    assert subprocess.run(line, env=environment(), timeout=60).returncode == 130
