"""A socket listens on one address; what cannot be had teaches."""

from __future__ import annotations

import socket

import pytest

from paceline.contract.errors import UserError
from paceline.distributed.sockets import listen


def test_a_socket_listens_on_one_address() -> None:
    with listen() as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        socket.create_connection((host, port)).close()
        with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1: in use") as refused:
            listen(port)
    free = int(refused.value.fix.split()[1])
    listen(free).close()
    # the connection above is still winding up, which keeps no other run from the port
    listen(port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host.invalid"])
def test_an_address_of_elsewhere_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="cannot listen"):
        listen(0, host)
