"""How the processes of a Horovod job reach each other over Gloo: interfaces, and the rendezvous server."""

import json
import socket
import urllib.error
import urllib.request

import psutil
import pytest

from tests.processes.jobs import free_addresses
from tfdist.errors import UsageError
from tfdist.groups import horovod
from tfdist.jobs.world import World

ADDRESSES = {"node1": "127.0.1.1", "node2": "192.0.2.2"}


def world(*addresses, rank=0):
    task = {"type": "worker", "index": rank}
    return World.detect({"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": task})})


@pytest.fixture
def node1(monkeypatch):
    """This host as Debian sets it up: its own name, `node1`, stands for a loopback address."""

    def look_up(host, port, *_, **__):
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (ADDRESSES.get(host, host), port))]

    entry = psutil.net_if_addrs()["lo"][0]
    interfaces = {"lo": [entry], "eth0": [entry._replace(address="192.0.2.1")]}
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: ADDRESSES.get(host, host))
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(horovod, "_address_towards", lambda host, port: ["192.0.2.1"])
    monkeypatch.setenv(horovod.CONTROLLER, "gloo")


def build(monkeypatch, version):
    monkeypatch.setattr(horovod.importlib.metadata, "version", lambda name: version)


TWO_HOSTS = world("node1:2222", "node2:2222")


@pytest.mark.parametrize("host", ["node1", "192.0.2.1"])
def test_the_interface_is_one_that_other_hosts_reach(node1, host):
    assert horovod.gloo_variables(world(f"{host}:1", "192.0.2.2:1"))["HOROVOD_GLOO_IFACE"] == "eth0"


def test_processes_of_one_host_use_the_loopback_interface(node1):
    variables = horovod.gloo_variables(world("192.0.2.1:1", "192.0.2.1:2"))
    assert (variables["HOROVOD_GLOO_IFACE"], variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"]) == ("lo", "127.0.0.1")


def test_an_unpatched_horovod_is_refused_where_a_hosts_name_is_a_loopback_address(node1, monkeypatch):
    build(monkeypatch, "0.28.1")
    with pytest.raises(UsageError) as found:
        horovod.require_reachable(TWO_HOSTS)
    assert "the host of worker 0 (node1:2222) calls itself `node1`, which is `127.0.1.1` there" in found.value.sentence
    assert "make horovod" in found.value.hint


@pytest.mark.parametrize(
    ("version", "job"),
    [("0.28.1+tfdist", TWO_HOSTS), ("0.28.1", world("node1:1", "node1:2"))],
    ids=["patched", "local"],
)
def test_no_other_job_is_refused(node1, monkeypatch, version, job):
    build(monkeypatch, version)
    horovod.require_reachable(job)


def test_the_rendezvous_server_of_one_host_is_closed_to_others_and_after_the_start():
    pytest.importorskip("horovod")
    here = world(*free_addresses(2))
    port = here.tasks[0].port
    with horovod._serving(here):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/global/0")
        (listening,) = [c.laddr for c in psutil.Process().net_connections() if c.laddr[1] == port and not c.raddr]
        assert listening.ip == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port))
