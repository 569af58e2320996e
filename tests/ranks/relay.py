"""A switch between TAP devices that forwards every frame after a delay.

    relay.py SECONDS DEVICE...

Makes the devices, prints "ready" and forwards until its input ends. Needs root. For kernels without
the queueing discipline netem. A device that is moved to another network namespace stays connected.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
# A frame of the largest MTU, and a device's queue.
FRAME_BYTES = 65536
MOST_WAITING = 10000


def open_tap(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Switch:
    """`waiting` are (time to send, devices, frame), in order, because the delay is constant."""

    def __init__(self, devices, delay):
        self.devices = devices
        self.delay = delay
        self.known = {}  # the device of an address
        self.waiting = collections.deque()

    def take(self, device):
        """Reads the frames that have arrived at a device."""
        while True:
            try:
                frame = os.read(device, FRAME_BYTES)
            except OSError:  # no more, or the device is down
                return
            self.known[frame[6:12]] = device
            to = self.known.get(frame[:6])
            targets = [to] if to is not None else [d for d in self.devices if d != device]
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append((time.monotonic() + self.delay, targets, frame))

    def send(self):
        """Sends what is due. Returns the seconds until the next frame; None if there is none."""
        while self.waiting:
            left = self.waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, targets, frame = self.waiting.popleft()
            for device in targets:
                try:
                    os.write(device, frame)
                except OSError:  # as on a network, a frame can be lost
                    pass
        return None


def main():
    devices = [open_tap(name) for name in sys.argv[2:]]
    switch = Switch(devices, float(sys.argv[1]))
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([*devices, sys.stdin], [], [], switch.send())
        if sys.stdin in readable:
            return
        for device in readable:
            switch.take(device)


if __name__ == "__main__":
    main()
