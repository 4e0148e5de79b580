"""Programs that do not belong to the job, and connect to all its open ports while it starts and trains."""

import contextlib
import socket
import struct
import threading
import time

import psutil

# A length that no message has, in both byte orders, what other protocols send, and nothing but zeros.
GREETINGS = (
    struct.pack("!Q", 1 << 63),
    struct.pack("<Q", 1 << 63),
    struct.pack("!I", (1 << 32) - 1),
    b"GET / HTTP/1.1\r\nHost: stranger\r\n\r\n",
    bytes(4096),
)
SECONDS_BETWEEN_BYTES = 0.5
_IPV4, _RECORDED_BYTES = 0x0800, 4096


class Strangers:
    """Sends every greeting to every port, replays what processes of the job have said first, and speaks slowly.

    Attributes:
        attempts: how many connections the strangers have made.
    """

    def __init__(self, job):
        self.attempts = 0
        self._job, self._ended, self._ports = job, threading.Event(), set()
        self._local_ports, self._replayed, self._slow = set(), set(), []
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._greet, self._replay)]
        for thread in self._threads:
            thread.start()

    def close(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for connection in self._slow:
            connection.close()

    def _greet(self):
        while not self._ended.wait(0.1):
            for port in self._new_ports():
                for greeting in GREETINGS:
                    with contextlib.suppress(OSError), self._connected(port) as connection:
                        connection.sendall(greeting)
                        time.sleep(0.01)
                with contextlib.suppress(OSError):
                    self._slow.append(self._connected(port))
            self._send_slowly()

    def _new_ports(self):
        there = set()
        for process in self._job.everyone():
            with contextlib.suppress(psutil.Error):
                there |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        new, self._ports = there - self._ports, there | self._ports
        return new

    def _connected(self, port):
        connection = socket.create_connection(("127.0.0.1", port), 1)
        self._local_ports.add(connection.getsockname()[1])
        self.attempts += 1
        return connection

    def _send_slowly(self):
        for connection in self._slow:
            with contextlib.suppress(OSError):
                connection.send(b"{")
        self._ended.wait(SECONDS_BETWEEN_BYTES)

    def _replay(self):
        """Says again the first words of each connection to a port of the job."""
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_IPV4)) as listener:
            listener.bind(("lo", 0))
            listener.settimeout(0.2)
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    self._say_again(*_tcp(listener.recv(65536)))

    def _say_again(self, sender, receiver, said):
        if (
            not said
            or receiver not in self._ports
            or sender in self._local_ports
            or (sender, receiver) in self._replayed
        ):
            return
        self._replayed.add((sender, receiver))
        with contextlib.suppress(OSError), self._connected(receiver) as connection:
            connection.sendall(said[:_RECORDED_BYTES])


def _tcp(packet):
    """The sender's port, the receiver's, and the data of a packet; no data if it is not of TCP."""
    if packet[9] != socket.IPPROTO_TCP:
        return 0, 0, b""
    segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4], "big")]
    sender, receiver = struct.unpack_from("!HH", segment)
    return sender, receiver, segment[4 * (segment[12] >> 4) :]
