"""`lockstep launch` starts the right ranks, with every launcher the result is the same, and lost ranks are named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import saboteur
from rich.console import Console
from rich.table import Table
from test_world import alive, wait_until

from lockstep.cli import app
from lockstep.comm import launchers
from lockstep.comm.errors import UsageError
from lockstep.comm.launchers import Hosts, Plan, command, hosts_of, read_hostfile

ROOT = Path(__file__).parent.parent
FULL = "LOCKSTEP_ALL_FAULTS" in os.environ  # every launcher, rank, place and fault: many minutes
RUN = ["--prompt-ids", "5,7,9", "--prompt-ids", "50,96,3,4,11", "--max-new-tokens", "12", "--ignore-eos"]
HAS = {
    "torchrun": True,
    "deepspeed": importlib.util.find_spec("deepspeed") is not None,
    "mpi": importlib.util.find_spec("mpi4py") is not None and Path(sys.executable).with_name("mpiexec").exists(),
}


def need(launcher: str) -> None:
    if not HAS.get(launcher, True):
        pytest.skip(f"{launcher} is not installed here")


def environment(**more: str) -> dict[str, str]:
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {k: v for k, v in os.environ.items() if k not in drop} | {"PYTHONPATH": path} | more


# --------------------------------------------------------------------------------------------------- command lines
def argv(launcher: str, ranks: int, devices: str | None = None, **more: Any) -> list[str]:
    return list(command(Plan(launcher, ranks, ("generate", "m", "--tp", str(ranks)), **more), devices=devices).argv)


def test_one_host() -> None:
    end = ["generate", "m", "--tp", "2"]
    assert argv("local", 2) == [sys.executable, "-m", "lockstep.cli", *end]
    torchrun = argv("torchrun", 2)
    assert torchrun[-6:] == ["-m", "lockstep.cli", *end]
    assert "--standalone" in torchrun
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
        ("-- launch --tp 2", "launch does not launch itself"),
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


# ------------------------------------------------------------------------------------------------------- real runs
@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoints.cached("deepseek_v3")


def launched(model: Path, file: Path, launcher: str, *options: str) -> dict[str, Any]:
    """The result of a real launch; its timings are dropped."""
    line = [sys.executable, "-m", "lockstep.cli", "launch", "--launcher", launcher, "--", "generate", str(model), *RUN]
    ran = subprocess.run(
        [*line, "--tp", "2", "--json", str(file), "--timeout", "60", *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    del result["timings"]
    return result


@pytest.mark.parametrize(
    ("launcher", "comm"),
    [("local", "deepspeed"), ("deepspeed", "deepspeed"), ("mpi", "mpi")]
    + ([("torchrun", "torch"), ("torchrun", "deepspeed"), ("deepspeed", "torch"), ("mpi", "torch")] if FULL else []),
)
def test_every_launcher_and_comm_gives_the_same_result(model: Path, tmp_path: Path, launcher: str, comm: str) -> None:
    need(launcher)
    need(comm)
    shared = set(os.listdir("/dev/shm"))
    file = tmp_path / "result.json"
    assert app.main(["generate", str(model), *RUN, "--tp", "2", "--json", str(file)]) == 0
    expected = json.loads(file.read_text())
    del expected["timings"]
    assert launched(model, file, launcher, "--comm", comm) == expected
    assert [f.name for f in tmp_path.iterdir()] == ["result.json"]
    assert set(os.listdir("/dev/shm")) == shared


TIMEOUT_S = 10.0
SLACK_S = 15.0  # for the launcher to notice, on a machine with other work
LAUNCHED = ("torchrun", "deepspeed", "mpi")
CASES = [
    (launcher, culprit, place, how)
    for launcher in LAUNCHED
    for place in saboteur.PLACES
    for culprit in (0, 1)
    for how in ("kill", "stop")
]
FEW = [("torchrun", 0, "draft", "stop"), ("deepspeed", 1, "exit", "kill")]
PLACE = {"load": "load", "prefill": "prefill", "verify": "verify", "draft": "draft", "exit": "(draft|verify)"}


@pytest.fixture(scope="module")
def table() -> Any:
    table = Table("launcher", "culprit", "place", "how", "code", "seconds", "said", box=None)
    yield table
    Console(width=240).print(table)


@pytest.mark.parametrize(("launcher", "culprit", "place", "how"), CASES if FULL else FEW)
def test_a_launcher_s_lost_rank_is_named_and_all_end(
    model: Path, tmp_path: Path, table: Table, launcher: str, culprit: int, place: str, how: str
) -> None:
    need(launcher)
    shared = set(os.listdir("/dev/shm"))
    pids, struck, file = tmp_path / "pids", tmp_path / "struck", tmp_path / "result.json"
    pids.mkdir()
    arguments = ["generate", str(model), *RUN, "--tp", "2", "--strategy", "sp-late", "--json", str(file)]
    arguments += ["--timeout", f"{TIMEOUT_S:g}"]
    line = command(Plan(launcher, 2, tuple(arguments)))
    sabotage = {"SABOTAGE": f"{culprit}:{place}:{how}", "SABOTAGE_PIDS": str(pids), "SABOTAGE_STRUCK": str(struck)}
    ran = subprocess.run(
        ["saboteur" if word == launchers.MODULE else word for word in line.argv],
        capture_output=True,
        text=True,
        env=environment(**sabotage) | line.environment,
        timeout=400,
    )
    took = time.time() - struck.stat().st_mtime
    said = re.findall(
        rf"lockstep: .*(rank {culprit} (?:has ended|is stopped): .*) \((?:this rank|[a-z-]+ at)", ran.stderr
    )
    table.add_row(launcher, str(culprit), place, how, str(ran.returncode), f"{took:.0f}", " | ".join(said))
    assert ran.returncode != 0
    assert len(list(pids.iterdir())) == 2
    assert wait_until(lambda: not any(alive(int(pid.name)) for pid in pids.iterdir()))
    assert set(os.listdir("/dev/shm")) == shared
    if place == "write":
        assert not file.exists() or json.loads(file.read_text())["requests"]
        return
    assert not file.exists()
    assert said, ran.stderr
    assert re.search(rf"on \S+ in {PLACE[place]}", said[0])
    assert took < TIMEOUT_S + 5 + SLACK_S


def test_hosts_that_are_here() -> None:
    assert Hosts().only_here
    assert not Hosts(("elsewhere",), (1,)).only_here
