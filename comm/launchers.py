"""The launchers' command lines: what starts P ranks of `python -m lockstep.cli ARGUMENTS`, on one host or several.

Pure: nothing is started here, and no launcher is imported.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.errors import UsageError

LAUNCHED = ("generate", "compare", "comm-bench")  # the commands that have ranks
MAX_RANKS = 1024
LAUNCHERS = ("local", "torchrun", "deepspeed", "mpi")
MODULE = "lockstep.cli"
AGREED_PORT = 29500  # of a run on several hosts that are started apart, where none was given
# What of this environment ranks on other hosts get, by its beginnings; deepspeed itself sends PYTHON* and little more.
SENT = ("GLOO_", "NCCL_", "TORCH_", "OMP_", "MKL_", "KMP_", "DS_ACCELERATOR")
DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of which torch needs one for CUDA or ROCm
HOSTFILE_LINE = re.compile(r"(\S+)\s+slots=([1-9]\d*)\s*(#.*)?$")


@dataclass(frozen=True)
class Hosts:
    """Where ranks run: `slots` ranks on each of the names. `file` is what names them, None for this host alone."""

    names: tuple[str, ...] = ("localhost",)
    slots: tuple[int, ...] = ()
    file: Path | None = None

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    @property
    def only_here(self) -> bool:
        return len(self.names) == 1 and self.names[0] in ("localhost", "127.0.0.1", "::1", socket.gethostname())


@dataclass(frozen=True)
class Plan:
    """What `lockstep launch` was asked for. `node_rank` is which of the hosts this is, where each is started apart."""

    launcher: str
    ranks: int
    arguments: tuple[str, ...]
    hosts: Hosts = Hosts()
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def over_ssh(self) -> bool:
        """Whether the launcher itself reaches the other hosts with pdsh, which needs no more than ssh there."""
        apart = self.node_rank is not None or self.hosts.file is None
        return self.launcher == "deepspeed" and not self.hosts.only_here and not apart


@dataclass(frozen=True)
class Command:
    """`environment` is set for it, and `without` taken away."""

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def read_hostfile(file: Path) -> Hosts:
    """`NAME slots=N` on each line. Where the file is missing DeepSpeed would run on this host alone (CASES F3)."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = HOSTFILE_LINE.match(line.strip())
        if not match:
            raise UsageError(f"--hostfile {file}, line {number}: {line.strip()!r} is not like 'worker-1 slots=8'")
        if match[1] in found:
            raise UsageError(f"--hostfile {file}, line {number}: {match[1]} stands there twice")
        found[match[1]] = int(match[2])
    if not found:
        raise UsageError(f"--hostfile {file} names no host; give lines like 'worker-1 slots=8'")
    return Hosts(tuple(found), tuple(found.values()), file)


def hosts_of(ranks: int, hostfile: Path | None, num_nodes: int | None) -> Hosts:
    """Where `ranks` ranks run; refused where the hosts do not have exactly that many places."""
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        if sum(hosts.slots) != ranks:
            places = " + ".join(map(str, hosts.slots))
            raise UsageError(f"--hostfile {hostfile} has {places} slots, and --tp is {ranks}; make them equal")
        if num_nodes not in (None, len(hosts.names)):
            raise UsageError(f"--hostfile {hostfile} names {len(hosts.names)} hosts, and --nnodes is {num_nodes}")
        return hosts
    nodes = num_nodes or 1
    if ranks % nodes:
        raise UsageError(f"--tp {ranks} ranks cannot be shared equally by --nnodes {nodes}; use a --hostfile")
    names = tuple(f"node-{i}" for i in range(nodes)) if nodes > 1 else ("localhost",)
    return Hosts(names, (ranks // nodes,) * nodes)


def command(plan: Plan, *, devices: str | None = None) -> Command:
    """The command line. `devices` is CUDA_VISIBLE_DEVICES, where ranks on CUDA devices are to use only those."""
    if plan.hosts.only_here and plan.node_rank:
        raise UsageError(f"--node-rank {plan.node_rank}: there is one host; use --nnodes or --hostfile")
    if plan.launcher == "deepspeed":
        return _deepspeed(plan, devices)
    return {"local": _local, "torchrun": _torchrun, "mpi": _mpi}[plan.launcher](plan)


def _local(plan: Plan) -> Command:
    if not plan.hosts.only_here:
        raise UsageError("--launcher local starts ranks on this host only; use torchrun, deepspeed or mpi")
    return Command((sys.executable, "-m", MODULE, *plan.arguments), _threads())


def _torchrun(plan: Plan) -> Command:
    # --log-dir: else each run leaves a folder, though nothing is logged there.
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--log-dir", os.devnull)
    module = ("-m", MODULE, *plan.arguments)
    if plan.hosts.only_here:
        here = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(plan.ranks))
        return Command((*torchrun, *here, *module), _threads() | _loopback())
    node = _node_rank(plan)
    places = ("--nnodes", str(len(plan.hosts.names)), "--nproc-per-node", str(plan.hosts.slots[node]))
    if len(set(plan.hosts.slots)) > 1:
        raise UsageError("torchrun needs the same number of slots on every host; use --launcher deepspeed")
    meet = ("--node-rank", str(node), "--master-addr", _master(plan), "--master-port", str(_agreed(plan)))
    return Command((*torchrun, *places, *meet, *module), _threads())


def _deepspeed(plan: Plan, devices: str | None) -> Command:
    # --no_local_rank: else it puts --local_rank before the sub-command.
    module = ("--no_local_rank", "--module", MODULE, *plan.arguments)
    runner = (sys.executable, "-m", "deepspeed.launcher.runner", "--quiet")
    here = _threads() | _accelerator(plan.arguments)
    without = ("CUDA_VISIBLE_DEVICES",)  # it takes the variable for a list of slots, and sets it for each rank
    if plan.hosts.only_here:  # and so without a hostfile, which would make it ask for ssh (CASES F4)
        port = ("--master_port", str(plan.master_port or free_port()))
        local = (*runner, "--hostfile", "", *_slots(plan.ranks, devices), *port)
        return Command((*local, *module), here | _loopback(), without)
    if plan.hosts.file is None:
        # What the runner would start on this host, over ssh, had it a hostfile.
        world = {name: list(range(slots)) for name, slots in zip(plan.hosts.names, plan.hosts.slots, strict=True)}
        encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        node = ("--world_info", encoded, "--node_rank", str(_node_rank(plan)), "--master_addr", _master(plan))
        launch = (sys.executable, "-m", "deepspeed.launcher.launch", "--quiet", *node)
        return Command((*launch, "--master_port", str(_agreed(plan)), *module), here, without)
    hosts = (*runner, "--hostfile", str(plan.hosts.file))
    alone = plan.over_ssh and _master(plan) == socket.gethostname()  # nobody else has to know the port beforehand
    agreed = plan.master_port or (free_port() if alone else AGREED_PORT)
    meet = ("--master_addr", _master(plan), "--master_port", str(agreed))
    if not plan.over_ssh:
        apart = ("--no_ssh", "--node_rank", str(plan.node_rank))
        return Command((*hosts, *apart, *meet, *module), here, without)
    # -N: pdsh puts no host's name before each line. --quiet is for what runs on each host; the runner does not send its
    # own there, but takes what follows the two dashes for the script's name.
    over_ssh = ("--force_multi", *meet, "--no_local_rank", "--no_python", "--launcher_args=-N", "--", "--quiet")
    return Command((*hosts, *over_ssh, *_far(plan)), {}, without)


def _far(plan: Plan) -> tuple[str, ...]:
    """What each rank is, where deepspeed sends the words through pdsh and a shell: `env SETTINGS python -m ...`."""
    for path in (sys.executable, os.getcwd()):
        if "%" in path or shlex.quote(path) != path:  # the runner writes it as it is
            raise UsageError(f"--launcher deepspeed cannot go to {path!r} on other hosts; use a path of plain letters")
    sent = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SENT)]
    words = ("env", *sent, sys.executable, "-u", "-m", MODULE, *plan.arguments)
    return tuple(_for_pdsh(word) for word in words)


def _for_pdsh(word: str) -> str:
    """`word` such that it is read as itself: pdsh replaces %h and the like, and then a shell splits the line.

    The runner puts a word with a space into double quotes itself, and a backslash before each of its double quotes.
    """
    word = word.replace("%", "%%")
    return re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)


def _mpi(plan: Plan) -> Command:
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise UsageError("--launcher mpi: there is no mpiexec; pip install 'lockstep-decode[mpi]'")
    if len(set(plan.hosts.slots)) > 1:
        raise UsageError("mpiexec needs the same number of slots on every host here; use --launcher deepspeed")
    if plan.hosts.file is None and plan.hosts.several:
        raise UsageError("--launcher mpi reaches other hosts itself: name them in a --hostfile")
    hosts: tuple[str, ...] = ()
    if not plan.hosts.only_here:
        hosts = ("-hosts", ",".join(plan.hosts.names), "-ppn", str(plan.hosts.slots[0]))
    chosen = () if option(plan.arguments, "--comm") else ("--comm", "mpi")
    # It would kill the other ranks before they have said which one was lost; they end by themselves.
    argv = (
        mpiexec,
        "-disable-auto-cleanup",
        *hosts,
        "-n",
        str(plan.ranks),
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        MODULE,
        *plan.arguments,
    )
    master = "127.0.0.1" if plan.hosts.only_here else plan.hosts.names[0]
    meet = {"MASTER_ADDR": plan.master_addr or master, "MASTER_PORT": str(plan.master_port or free_port())}
    return Command((*argv, *chosen), _threads() | meet | (_loopback() if plan.hosts.only_here else {}))


def _slots(ranks: int, devices: str | None) -> tuple[str, ...]:
    """Which devices the ranks get. Without --num_gpus deepspeed starts one rank on a CPU (CASES F2, F5)."""
    if devices is None:
        return ("--num_gpus", str(ranks))
    listed = [d for d in devices.split(",") if d]
    if len(listed) < ranks or not all(d.isdecimal() for d in listed):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={devices} with --launcher deepspeed: give {ranks} device numbers, or unset it"
        )
    return ("--include", f"localhost:{','.join(listed[:ranks])}")


def _node_rank(plan: Plan) -> int:
    """Which of the hosts this one is: as given, or as its name stands in the hostfile."""
    names = plan.hosts.names
    if plan.node_rank is not None:
        if plan.node_rank >= len(names):
            raise UsageError(f"--node-rank {plan.node_rank}: there are {len(names)} hosts, numbered from 0")
        return plan.node_rank
    if plan.hosts.file is not None and socket.gethostname() in names:
        return names.index(socket.gethostname())
    raise UsageError(f"run this on each of the {len(names)} hosts, with --node-rank 0 to {len(names) - 1}")


def _master(plan: Plan) -> str:
    if plan.master_addr:
        return plan.master_addr
    if plan.hosts.file is None:
        raise UsageError("several hosts need --master-addr, the address of the first of them")
    return plan.hosts.names[0]


def _agreed(plan: Plan) -> int:
    return plan.master_port or AGREED_PORT


def free_port() -> int:
    """A port that is free now. Another process may take it first; then the ranks cannot join, and say so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _threads() -> dict[str, str]:
    """One thread per rank, as everywhere, unless the user has said otherwise."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _accelerator(arguments: Sequence[str]) -> dict[str, str]:
    """What deepspeed would else find out, and say on standard output, where a result may go."""
    cpu = option(arguments, "--device") == "cpu" or not any(Path(device).exists() for device in DEVICES)
    return {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")} if cpu else {}


def _loopback() -> dict[str, str]:
    """gloo's interface where all ranks are on this host, whatever its name resolves to."""
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if sys.platform == "linux" else {}


def ranks_of(arguments: Sequence[str]) -> int:
    """The --tp of a command's arguments; of several, as `compare` takes, the largest, its --reference included."""
    if arguments[0] not in LAUNCHED:
        raise UsageError(f"launch starts the ranks of {', '.join(LAUNCHED)}, and {arguments[0]!r} is none of them")
    given = option(arguments, "--tp")
    if given is None:
        raise UsageError("the command to launch needs --tp P, the number of ranks to start")
    counts = given.split(",")
    if not all(count.strip().isdecimal() and 0 < int(count) <= MAX_RANKS for count in counts):
        raise UsageError(f"--tp {given} of the command to launch is not a number of ranks, 1 to {MAX_RANKS}")
    reference = re.search(r"@(\d+)\+", option(arguments, "--reference") or "")
    return max(*map(int, counts), int(reference[1]) if reference else 1)


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option that may be written `--name VALUE` or `--name=VALUE`; the last one counts."""
    found = None
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found
