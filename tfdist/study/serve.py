"""Serves the page of a report to browsers on this machine, and nothing else from its folder.

Synopsis:

    >>> import urllib.request
    >>> with serving("<p>all runs</p>") as server:
    ...     urllib.request.urlopen(address(server)).read()
    b'<p>all runs</p>'
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tfdist.errors import UsageError

HOST = "127.0.0.1"


@contextmanager
def serving(html: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serves the page from a thread until the context ends.

    Args:
        html: the page.
        port: the port to listen on; 0 for any free port.

    Raises:
        UsageError: the port is in use, or not valid.
    """
    page = html.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Does not log requests."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"The report cannot be shown on port {port}: {error}", "name another `--port`") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server: ThreadingHTTPServer) -> str:
    """Returns the URL of the page."""
    return f"http://{HOST}:{server.server_port}/"
