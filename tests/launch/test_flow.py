"""What a link is said to carry, where the reader was kept from reading."""

import socket
import threading

from launch.flow import payload_bps


def test_what_waited_before_the_window_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    enough = threading.Event()

    def trickle() -> None:
        while not enough.wait(0.01):
            near.sendall(b"x")

    with near, far:
        near.sendall(bytes(1 << 16))
        trickling = threading.Thread(target=trickle)
        trickling.start()
        try:
            assert payload_bps(far, warm_up_s=0, window_s=1.0) < 100 * 8 * 2
        finally:
            enough.set()
            trickling.join()
