"""`lockstep launch` writes the right command lines, and the launchers' own commands start the right ranks too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from launched import LAUNCH, RUN, environment, need

from lockstep.cli import app
from lockstep.comm.errors import UsageError
from lockstep.comm.launchers import Hosts, Plan, command, free_port, hosts_of, ranks_of, read_hostfile


def argv(launcher: str, ranks: int, devices: str | None = None, **more: Any) -> list[str]:
    return list(command(Plan(launcher, ranks, ("generate", "m", "--tp", str(ranks)), **more), devices=devices).argv)


def test_one_host() -> None:
    end = ["generate", "m", "--tp", "2"]
    assert argv("local", 2) == [sys.executable, "-m", "lockstep.cli", *end]
    torchrun = argv("torchrun", 2)
    assert torchrun[-6:] == ["-m", "lockstep.cli", *end]
    assert "--standalone" in torchrun
    assert " --log-dir /dev/null " in " ".join(torchrun)
    assert " --nproc-per-node 2 " in " ".join(torchrun)
    deepspeed = argv("deepspeed", 2)
    assert deepspeed[-7:] == ["--no_local_rank", "--module", "lockstep.cli", *end]
    assert " --num_gpus 2 " in " ".join(deepspeed)


def test_two_runs_get_two_ports() -> None:
    ports = [line[line.index("--master_port") + 1] for line in (argv("deepspeed", 2), argv("deepspeed", 2))]
    assert ports[0] != ports[1]
    assert "29500" not in ports


def test_the_devices_that_the_user_allows_are_the_ones_deepspeed_gets() -> None:
    assert " --include localhost:3,1 " in " ".join(argv("deepspeed", 2, devices="3,1,0"))
    for devices in ("1", "GPU-5f3a", "1,GPU-5f3a"):
        with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES={devices} .*give 2 device numbers, or unset it"):
            argv("deepspeed", 2, devices=devices)
    assert "CUDA_VISIBLE_DEVICES" in command(Plan("deepspeed", 2, ())).without


def test_several_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=2\n\n b  slots=2 # the second\n")
    hosts = hosts_of(4, file, None)
    assert (hosts.names, hosts.slots) == (("a", "b"), (2, 2))
    torchrun = " ".join(argv("torchrun", 4, hosts=hosts, node_rank=1))
    assert " --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr a --master-port 29500 " in torchrun
    over_ssh = " ".join(argv("deepspeed", 4, hosts=hosts))
    assert f" --hostfile {file} --force_multi --master_addr a --master_port 29500 --no_local_rank " in over_ssh
    apart = " ".join(argv("deepspeed", 4, hosts=hosts, node_rank=0, master_port=7))
    assert f" --hostfile {file} --no_ssh --node_rank 0 --master_addr a --master_port 7 " in apart
    without = argv("deepspeed", 4, hosts=hosts_of(4, None, 2), node_rank=1, master_addr="10.0.0.1")
    assert "deepspeed.launcher.launch" in without
    assert " --node_rank 1 --master_addr 10.0.0.1 " in " ".join(without)
    with pytest.raises(UsageError, match="run this on each of the 2 hosts, with --node-rank 0 to 1"):
        argv("torchrun", 4, hosts=hosts)
    with pytest.raises(UsageError, match="several hosts need --master-addr"):
        argv("torchrun", 4, hosts=hosts_of(4, None, 2), node_rank=0)
    with pytest.raises(UsageError, match="--node-rank 2: there are 2 hosts"):
        argv("torchrun", 4, hosts=hosts, node_rank=2)


def test_a_hostfile_of_this_host_needs_no_ssh(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2\n")
    line = argv("deepspeed", 2, hosts=hosts_of(2, file, None))
    assert str(file) not in line
    assert " --num_gpus 2 " in " ".join(line)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host"),
        ("a\n", r"line 1: 'a' is not like 'worker-1 slots=8'"),
        ("a slots=1\nb slots=x\n", r"line 2: 'b slots=x' is not like"),
        ("a slots=0\n", r"line 1: 'a slots=0' is not like"),
        ("a slots=1\na slots=1\n", "line 2: a stands there twice"),
    ],
)
def test_a_bad_hostfile_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--hostfile nope -- generate demo --tp 2", "--hostfile nope cannot be read: No such file"),
        ("-- generate demo", "the command to launch needs --tp P"),
        ("--nnodes 2 -- generate demo --tp 3", "--tp 3 ranks cannot be shared equally by --nnodes 2"),
        ("--node-rank 1 -- generate demo --tp 2", "--node-rank 1: there is one host"),
        ("--launcher slurm -- generate demo --tp 2", "--launcher 'slurm' is not known; use local, torchrun"),
        ("-- launch --tp 2", "launch starts the ranks of generate, compare, comm-bench, and 'launch' is none of them"),
        ("inspect demo --tp 2", "and 'inspect' is none of them"),
        ("-- compare demo --tp 1,x", "--tp 1,x of the command to launch is not a number of ranks, 1 to 1024"),
        ("-- generate demo --tp 100000", "--tp 100000 of the command to launch is not a number of ranks"),
        ("--hostfile HOSTS -- generate demo --tp=2", "has 2 + 1 slots, and --tp is 2; make them equal"),
    ],
)
def test_a_launch_that_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    arguments = [str(tmp_path / "hosts") if word == "HOSTS" else word for word in line.split()]
    assert app.main(["launch", "--dry-run", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_dry_run_is_a_command_line_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "--launcher", "torchrun", "--dry-run", "--", "generate", "demo", "--prompt", "a 'b'"]
    assert app.main([*arguments, "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    split = subprocess.run(["bash", "-c", f"printf '%s\\n' {shown}"], capture_output=True, text=True, check=True)
    assert split.stdout.splitlines()[-4:] == ["--prompt", "a 'b'", "--tp", "2"]


def test_hosts_that_are_here() -> None:
    assert Hosts().only_here
    assert not Hosts(("elsewhere",), (1,)).only_here


# --------------------------------------------------------------------------------------- the launchers' own commands
BESIDE = Path(sys.executable).parent
DEEPSPEED = [str(BESIDE / "deepspeed"), "--num_gpus", "2", "--master_port", "PORT"]
ONE = [str(BESIDE / "deepspeed"), "--master_port", "PORT", "--no_local_rank"]
TORCHRUN = [str(BESIDE / "torchrun"), "--standalone", "--nproc-per-node", "2", "--log-dir", os.devnull]


def generate(file: Path, line: list[str], *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = [str(free_port()) if word == "PORT" else word for word in line]
    line = [*line, "generate", str(checkpoints.cached("deepseek_v3")), *RUN, "--json", str(file), *options]
    return subprocess.run(line, capture_output=True, text=True, env=environment(**more), timeout=300)


@pytest.mark.parametrize(
    ("launcher", "line", "more"),
    [
        ("deepspeed", [*DEEPSPEED, "--module", "lockstep.cli"], {}),  # puts --local_rank before the sub-command
        ("deepspeed", [*DEEPSPEED, "--no_local_rank", "--module", "lockstep.cli"], {"CUDA_VISIBLE_DEVICES": "1"}),
        ("torchrun", [*TORCHRUN, "-m", "lockstep.cli"], {}),
    ],
)
def test_a_launcher_s_own_command_starts_the_ranks(
    tmp_path: Path, launcher: str, line: list[str], more: dict[str, str]
) -> None:
    need(launcher)
    ran = generate(tmp_path / "result.json", line, **more)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "result.json").read_text())["effective"]["tp"] == 2


def test_devices_that_deepspeed_would_take_for_slots_are_no_matter_on_a_cpu(tmp_path: Path) -> None:
    need("deepspeed")
    line = [*LAUNCH, "--launcher", "deepspeed", "--"]
    ran = generate(tmp_path / "result.json", line, "--tp", "2", "--device", "cpu", CUDA_VISIBLE_DEVICES="1")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("launcher", "line", "ranks", "code", "says"),
    [
        ("deepspeed", [*ONE, "--module", "lockstep.cli"], 2, 2, "the launcher started 1 rank, but --tp is 2: start 2"),
        ("torchrun", [*TORCHRUN, "-m", "lockstep.cli"], 3, 1, "the launcher started 2 ranks, but --tp is 3: start 3"),
    ],
)
def test_another_number_of_ranks_than_tp_is_one_line(
    tmp_path: Path, launcher: str, line: list[str], ranks: int, code: int, says: str
) -> None:
    need(launcher)
    ran = generate(tmp_path / "result.json", line, "--tp", str(ranks))
    assert ran.returncode == code, ran.stderr
    (said,) = [row for row in ran.stderr.splitlines() if row.startswith("lockstep: ")]
    assert says in said
    assert list(tmp_path.iterdir()) == []


def test_as_many_ranks_as_the_largest_run_needs() -> None:
    assert ranks_of(["compare", "m", "--tp", "1,4,2"]) == 4
    assert ranks_of(["compare", "m", "--tp=1", "--reference", "sp-late:gather-sum@8+3"]) == 8


@pytest.mark.parametrize(
    ("told", "own", "code"),
    [((75, 2, 3), 1, 2), ((75,), 247, 3), ((), 1, 3), ((1,), 1, 1), ((0, 0), 0, 0), ((), -9, 3)],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(told: tuple[int, ...], own: int, code: int) -> None:
    end = "import os; os.kill(os.getpid(), 9)" if own < 0 else f"raise SystemExit({own})"
    assert _run(f"from lockstep.cli.exit_codes import tell; [tell(c) for c in {told}]; {end}").wait() == code


@pytest.mark.parametrize(("patience_s", "signals"), [(0.3, 1), (60, 2)])
def test_what_ignores_a_signal_is_ended(patience_s: float, signals: int) -> None:
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
    started = _run(deaf + "print('up', flush=True); time.sleep(100)", patience_s)
    assert started.stdout and started.stdout.readline() == "up\n"
    for _ in range(signals):
        started.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert started.wait(timeout=30) == 130


def _run(code: str, patience_s: float = 30.0) -> subprocess.Popen[str]:
    """launcher.run, of Python that does `code`, in a process of its own."""
    run = "import sys; from lockstep.cli import launcher; from lockstep.comm.launchers import Command; "
    run += f"launcher.PATIENCE_S, launcher.GRACE_S = {patience_s}, 0.3; "
    run += f"sys.exit(launcher.run(Command((sys.executable, '-c', {code!r}))))"
    return subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True, env=environment())


def test_bad_input_is_said_by_one_rank_of_each_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
        assert app.main(["generate", "nosuch"]) == 2
        assert capsys.readouterr().err == ""
        monkeypatch.delenv(name)
