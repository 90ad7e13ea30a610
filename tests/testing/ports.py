"""Ports of this machine that nobody else will take."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20000, 32767
"""Below those that Linux (ip_local_port_range) and IANA's rules for other systems give to whoever asks for any."""


def free_port() -> int:
    """A port at which nobody listens, for a test that has to name one before its ranks listen there.

    One that the system chooses may be chosen again in between: every connection of every other test asks for one.
    """
    numbers = random.SystemRandom()
    while True:
        port = numbers.randint(FIRST, LAST)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
