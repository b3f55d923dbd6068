"""A link with a delay and a rate, where the kernel has no sch_netem: a process carries packets between two TUN devices.

`python relay.py NAMESPACE@ADDRESS NAMESPACE@ADDRESS DEVICE DELAY_S BITS_PER_S` says `up`, and runs until it is killed;
the devices go with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x1, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 1500
BACKLOG_S = 2.0  # what waits longer for its turn is dropped, as by any router


def tun(namespace: str, address: str, device: str) -> int:
    """A new device in that namespace, as a file of its packets."""
    with open(f"/var/run/netns/{namespace}") as inside:
        if ctypes.CDLL(None, use_errno=True).setns(inside.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    for line in (["addr", "add", address, "dev", device], ["link", "set", device, "mtu", str(MTU), "up"]):
        subprocess.run(["ip", *line], check=True)
    return file


def carry(source: int, target: int, delay_s: float, bits_per_s: float) -> None:
    """Packets leave in turn, at that rate, and reach `target` after the delay."""
    queue: deque[tuple[float, bytes]] = deque()
    filled = threading.Condition()

    def deliver() -> None:
        while True:
            with filled:
                filled.wait_for(lambda: queue)
                due, packet = queue.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    sent = 0.0  # when the last packet has left
    while True:
        packet = os.read(source, MTU)
        now = time.monotonic()
        if sent - now > BACKLOG_S:
            continue
        sent = max(sent, now) + 8 * len(packet) / bits_per_s
        with filled:
            queue.append((sent + delay_s, packet))
            filled.notify()


if __name__ == "__main__":
    ends = [tun(*end.split("@"), sys.argv[3]) for end in sys.argv[1:3]]
    link = float(sys.argv[4]), float(sys.argv[5])
    threading.Thread(target=carry, args=(ends[0], ends[1], *link), daemon=True).start()
    print("up", flush=True)
    carry(ends[1], ends[0], *link)
