"""Hosts that are reached over ssh: OpenSSH's own server, with keys and files of one test."""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.processes.jobs import ROOT

# It starts itself again for each connection, and wants to be called by its whole path.
SERVER = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

# A bare login: of what the launcher has in its environment, only tfdist is there too.
SERVER_CONFIGURATION = """
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/right_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
Banner {folder}/banner
# The folders of tests lie where everybody may write.
StrictModes no
SetEnv PYTHONPATH={root}
"""
CLIENT_CONFIGURATION = """
Host *
Port {port}
IdentityFile {folder}/{key}_key
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
"""


class Ssh:
    """Servers that the owner of one key may enter, each on an address of its own.

    Args:
        folder: for keys and configurations.
        port: of all servers.
    """

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        self.servers = []

    def prepare(self):
        if SERVER is None or shutil.which("ssh-keygen") is None:
            pytest.skip("there is no `sshd`: run scripts/install_openssh.sh")
        if os.geteuid() == 0:
            # The server locks up there what it lets strangers talk to; a container may not have it.
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        for key in ("host", "right", "wrong"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / f"{key}_key"]
            subprocess.run(command, check=True)
        (self.folder / "banner").write_text("This host greets you.\n")
        (self.folder / "known_hosts").write_text(f"* {(self.folder / 'host_key.pub').read_text()}")
        known = {"folder": self.folder, "port": self.port, "root": ROOT}
        (self.folder / "server").write_text(SERVER_CONFIGURATION.format(**known))
        for key in ("right", "wrong"):
            (self.folder / f"client_{key}").write_text(CLIENT_CONFIGURATION.format(key=key, **known))

    def options(self, key="right"):
        """What the launcher is given to reach the servers: nothing of the user's own is read, or written."""
        return ("--ssh-options", f"-F {self.folder}/client_{key}")

    def serve(self, address, inside=()):
        """Starts a server there; `inside` is a command that enters its host."""
        log = self.folder / f"{address}.log"
        command = [SERVER, "-D", "-f", self.folder / "server", "-E", log, "-o", f"ListenAddress={address}"]
        self.servers.append(subprocess.Popen([*inside, *command]))
        knock = f"import socket; socket.create_connection(('{address}', {self.port}), 1)"
        until = time.monotonic() + 10
        while subprocess.run([*inside, sys.executable, "-c", knock], check=False, capture_output=True).returncode:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)

    def processes(self, index):
        """What runs on the host of one server, by way of ssh."""
        return psutil.Process(self.servers[index].pid).children(recursive=True)

    def close(self):
        for server in self.servers:
            server.terminate()
            server.wait()
