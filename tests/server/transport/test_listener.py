"""A socket that ignores new handshakes resets nobody when it is closed."""

import errno
import select
import socket

import pytest

from recserve.server.transport.listener import drop_handshakes


@pytest.mark.parametrize("filtered", [False, True])
def test_a_client_that_connects_in_the_last_moment_is_refused_and_not_reset(filtered):
    with socket.socket() as listener, socket.socket() as early, socket.socket() as late:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        early.connect(listener.getsockname())
        if filtered and not drop_handshakes(listener):
            pytest.skip("this system does not filter handshakes")
        late.setblocking(False)
        late.connect_ex(listener.getsockname())
        early.sendall(b"hello")
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(5) == b"hello"
        listener.close()
        select.select([late], [late], [], 30)  # TCP tries again after a second
        error = late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        assert error == (errno.ECONNREFUSED if filtered else errno.ECONNRESET)


def test_a_system_that_refuses_the_filter_says_so():
    listener = socket.socket()
    listener.close()
    assert drop_handshakes(listener) is False
    with socket.socket(socket.AF_UNIX) as listener:
        assert drop_handshakes(listener) is False
