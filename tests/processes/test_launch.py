"""The launcher: what it starts, shows, passes on, returns, and that nothing is left of it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import launcher as launcher_benchmark
from tests.processes.jobs import RunningJob, clean_environment

SAY = """
import os, sys, time
from tfdist.world import World
world = World.detect()
time.sleep(2 * (world.task.role == "chief"))  # the others end with it
print(world.named(world.rank), len(os.sched_getaffinity(0)), sys.argv[1:])
"""
WAIT = "import time\nprint('here', flush=True)\ntime.sleep(100)\n"

FAIL = """
import sys
def deeper(depth):
    deeper(depth - 1) if depth else nothing_of_this_name
print("I0000 00:00:1795418197.165421    4247 port.cc:153] oneDNN is on.", file=sys.stderr)
print("/job:worker/replica:0/task:1", file=sys.stderr)
try:
    deeper(20)
except NameError as error:
    raise OSError("reason " * 20) from error
"""


def outputs(tmp_path):
    return {path.stem: path.read_text() for path in (tmp_path / "logs").glob("*/*.log")}


def launch(tmp_path, *arguments, **more):
    return RunningJob(*arguments, cwd=tmp_path, **more)


def test_each_process_knows_the_others_and_has_its_share_of_the_cores(tmp_path, script):
    with launch(tmp_path, "--workers", "2", "--ps", "1", script(SAY), "--flag", "a b") as job:
        code, out, err = job.end()
    assert (code, err) == (0, "")
    cores = len(os.sched_getaffinity(0))
    found = outputs(tmp_path)
    assert sorted(found) == ["chief-0", "ps-0", "worker-0", "worker-1"]
    for name, text in found.items():
        role, index = name.split("-")
        share = max(cores // 2, 1) if role == "worker" else cores
        assert text.startswith(f"{role} {index} (localhost:")
        assert text.endswith(f" {share} ['--flag', 'a b']\n")
    assert out == found["chief-0"]


def test_a_module_is_run_as_python_runs_it(tmp_path):
    with launch(tmp_path, "--workers", "2", "-m", "json.tool", "--help") as job:
        code, out, _ = job.end()
    assert code == 0
    assert "usage:" in out


def test_the_output_of_all_is_shown_with_who_said_it(tmp_path, script):
    with launch(tmp_path, "--verbose", script(SAY)) as job:
        _, out, _ = job.end()
    assert "[worker 1] worker 1 (" in out
    assert "\nworker 0 (" in "\n" + out


def test_lines_of_several_are_not_mixed_and_may_be_of_any_length(tmp_path, script):
    text = """
import time
for part in ("some", " words", "\\n", "=" * 300_000, "\\n", "the end"):
    print(part, end="", flush=True)
    time.sleep(0.2)
"""
    with launch(tmp_path, "--verbose", script(text)) as job:
        code, out, _ = job.end()
    assert code == 0
    said = ["some words", "=" * 300_000, "the end"]
    assert sorted(out.splitlines()) == sorted(said + [f"[worker 1] {line}" for line in said])


TALK = """
import json, os
from pathlib import Path
for number in range(20_000):
    print("line", number, flush=True)
task = json.loads(os.environ["TF_CONFIG"])["task"]
Path(f"done-{task['index']}").touch()
"""


def test_a_log_that_cannot_be_kept_is_told_once_and_the_job_goes_on(tmp_path, script):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.log").symlink_to("/dev/full")  # stands for a full disk
    with launch(tmp_path, "--log-dir", "logs", script(TALK)) as job:
        code, out, err = job.end(60)
    assert (code, len(out.splitlines())) == (0, 20_000)
    assert err.count("Not all output of worker 1 can be kept in logs/worker-1.log: No space left on device") == 1
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("where", "reason"),
    [("| head -1", "Broken pipe"), ("> /dev/full", "No space left on device"), (">&-", "it is closed")],
)
def test_a_job_whose_output_nobody_takes_ends_as_it_would_have(tmp_path, script, where, reason):
    command = f"set -o pipefail; {sys.executable} -m tfdist.launch --verbose {script(TALK)} {where}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"Not all output of the processes can be shown ({reason}); it is kept in logs/") == 1
    assert "Traceback" not in done.stderr
    assert {len(text.splitlines()) for text in outputs(tmp_path).values()} == {20_000}


def test_the_first_to_fail_is_shown_and_gives_the_exit_code_and_the_others_end(tmp_path, script):
    text = WAIT.replace(
        "time.sleep", "import sys, os\nif 'index\": 1' in os.environ['TF_CONFIG']: sys.exit(7)\ntime.sleep"
    )
    began = time.monotonic()
    with launch(tmp_path, script(text)) as job:
        code, _, err = job.end()
        assert job.left() == []
    assert code == 7
    assert "worker 1 ended with exit code 7" in err and "here" in err
    assert time.monotonic() - began < 15


def test_one_that_fails_by_itself_gives_the_exit_code_and_not_one_that_missed_it_before(tmp_path, script):
    text = "import os, sys, time\nmisses = 'index\": 1' in os.environ['TF_CONFIG']\ntime.sleep(0 if misses else 1)\n"
    with launch(tmp_path, script(text + "sys.exit(3 if misses else 7)")) as job:
        code, _, err = job.end()
    assert code == 7
    assert "worker 0 ended with exit code 7" in err


def test_a_failure_is_framed_whole_and_without_tensorflows_noise(tmp_path, script):
    with launch(tmp_path, script(FAIL)) as job:
        code, out, err = job.end()
    assert code == 1
    framed = " ".join(line.strip("│ \r") for line in err.splitlines() if line.startswith("│"))
    assert framed.startswith("Traceback") and framed.count("reason ") > 19 and "nothing_of_this_name" in framed
    assert "/job:" not in out + err and "oneDNN" not in out + err


def test_a_killed_process_is_named_with_its_signal(tmp_path, script):
    with launch(tmp_path, script(WAIT)) as job:
        job.process("worker", 1).kill()
        code, _, err = job.end()
        assert job.left() == []
    assert code == 128 + signal.SIGKILL
    assert "worker 1 was ended by SIGKILL" in err


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(1000)
"""


def started(job, tmp_path):
    """Waits until both processes of `STUBBORN` have their child."""
    job.wait_for(lambda: sum(text.count("child") for text in outputs(tmp_path).values()) == 2)
    job.everyone()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_signal_ends_all_within_ten_seconds_even_those_that_ignore_it(tmp_path, script, number):
    with launch(tmp_path, script(STUBBORN)) as job:
        started(job, tmp_path)
        began = time.monotonic()
        job.signal(number)
        code, _, _ = job.end()
        assert time.monotonic() - began < 10.5
        assert code == 128 + number
        assert job.left() == []


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, script):
    with launch(tmp_path, script(STUBBORN)) as job:
        started(job, tmp_path)
        job.signal(signal.SIGKILL)
        until = time.monotonic() + 15
        while job.left() and time.monotonic() < until:
            time.sleep(0.1)
        assert job.left() == []


def test_other_signals_are_passed_on(tmp_path, script):
    text = """
import signal, sys, time
def on_signal(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, on_signal)
print("ready", flush=True)
time.sleep(100)
"""
    with launch(tmp_path, script(text)) as job:
        job.wait_for(lambda: sum("ready" in text for text in outputs(tmp_path).values()) == 2)
        job.signal(signal.SIGUSR1)
        code, _, _ = job.end()
    assert code == 0
    assert all(f"got {signal.SIGUSR1.value}" in text for text in outputs(tmp_path).values())


def test_a_failed_job_is_started_again_so_often_and_knows_it(tmp_path, script):
    text = "import os, sys\nprint('start', os.environ['TFDIST_RESTART'])\nsys.exit(os.environ['TFDIST_RESTART'] != '2')"
    with launch(tmp_path, "--restarts", "2", script(text)) as job:
        code, out, err = job.end()
    assert code == 0
    assert err.count("Starting the job again") == 2
    assert out.splitlines()[-1] == "start 2"
    with launch(tmp_path, "--restarts", "1", "--log-dir", "other", script(text)) as job:
        code, _, _ = job.end()
    assert code == 1


def test_a_log_has_what_a_process_said_at_each_start(tmp_path, script):
    text = "import os, sys\nprint('start', os.environ['TFDIST_RESTART'])\nsys.exit(os.environ['TFDIST_RESTART'] == '0')"
    with launch(tmp_path, "--workers", "1", "--restarts", "1", script(text)) as job:
        assert job.end()[0] == 0
    assert list(outputs(tmp_path).values()) == ["start 0\nstart 1\n"]


def test_an_error_of_tfdist_is_one_sentence(tmp_path, script):
    with launch(tmp_path, "--workers", "1", script("import tfdist\ntfdist.strategy('multwork')\n")) as job:
        code, _, err = job.end()
    assert code == 2
    assert "did you mean `multiworker`?" in err
    assert "Traceback" not in err


LISTEN = """
import json, os, socket, time
from tfdist.jobs import ports
from tfdist.jobs.world import World
with ports.listen(World.detect().task.port) as listener:
    print("listening", listener.getsockname()[1], flush=True)
    time.sleep(100)
"""


def listening_ports(job, tmp_path):
    def found():
        lines = [re.search(r"listening (\d+)\n", text) for text in outputs(tmp_path).values()]
        return [int(line[1]) for line in lines if line]

    job.wait_for(lambda: len(found()) == 2)
    return found()


def can_connect(port, inside=()):
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
    return subprocess.run([*inside, sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_nobody_outside_can_connect_to_the_processes(tmp_path, script):
    with launch(tmp_path, script(LISTEN)) as job:
        found = listening_ports(job, tmp_path)
        process = job.process("worker", 0)
        if os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            pytest.skip("the system gives no network namespace")
        assert not any(can_connect(port) for port in found)
        if os.geteuid() == 0:
            enter = ["nsenter", "--net", "--target", str(process.pid)]
            assert all(can_connect(port, enter) for port in found)


def test_a_job_can_be_left_open(tmp_path, script):
    with launch(tmp_path, "--expose", script(LISTEN)) as job:
        assert all(can_connect(port) for port in listening_ports(job, tmp_path))


def test_a_job_that_cannot_be_closed_says_so(tmp_path, script):
    """A process that may not make a namespace: one in which the limit of them is 0."""
    if os.geteuid() != 0:
        pytest.skip("only root can set the limit")
    inner = f"echo 0 > /proc/sys/user/max_net_namespaces && exec {sys.executable} -m tfdist.launch {script(SAY)}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", inner],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "max_net_namespaces" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"the limit cannot be set here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "does not allow a network namespace" in done.stderr
    assert "as with `multiworker` and `parameter_server`, anyone" in done.stderr
    assert re.search(r"can reach these ports can run code as you: \d+, \d+ of this machine", done.stderr)


def test_held_ports_go_to_nobody_else(tmp_path, script):
    with launch(tmp_path, "--expose", script(WAIT)) as job:
        config = json.loads(job.process("worker", 0).environ()["TF_CONFIG"])
        for address in config["cluster"]["worker"]:
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("", int(address.rpartition(":")[2])))


SSH = """#!/bin/sh
# Stands for ssh where no server can run: the same arguments, the same streams, this machine.
echo "$@" >> "$SSH_CALLS"
while [ "$1" = "-o" ]; do shift 2; done
[ "$1" = "--" ] || exit 99
shift
case "$1" in unreachable) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255;; esac
shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "SSH_CALLS": str(tmp_path / "calls")}


def test_other_hosts_are_reached_over_ssh_without_a_question_or_a_secret(tmp_path, script, ssh):
    environment = ssh | {"MY_TOKEN": "very-secret"}
    with launch(tmp_path, "--hosts", "127.0.0.1,127.0.0.2", script(SAY), environment=environment) as job:
        code, out, err = job.end()
    assert code == 0, err
    assert out.startswith("worker 0 (127.0.0.1:")
    calls = (tmp_path / "calls").read_text()
    assert calls.count("BatchMode=yes") == 2
    assert "very-secret" not in calls
    assert outputs(tmp_path)["worker-1"].startswith("worker 1 (127.0.0.2:")


def test_one_connection_to_each_host_is_enough_for_all_its_processes(tmp_path, script, ssh):
    """The ranks of a host need not follow each other."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=3\n127.0.0.1\n")
    with launch(tmp_path, "--hostfile", "hosts", "--workers", "6", script(SAY), environment=ssh) as job:
        code, _, err = job.end()
    assert code == 0, err
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    said = {name: text.partition(":")[0] for name, text in outputs(tmp_path).items()}
    assert said == {
        f"worker-{index}": f"worker {index} (127.0.0.{host}" for index, host in enumerate([1, 1, 2, 2, 2, 1])
    }


def test_all_processes_of_a_host_whose_connection_breaks_end_the_job(tmp_path, script, ssh):
    """The agent is what stands for the connection here, in the place of ssh."""
    with launch(tmp_path, "--hosts", "127.0.0.1,127.0.0.2:2", "--workers", "3", script(WAIT), environment=ssh) as job:
        job.wait_for(lambda: sum("here" in text for text in outputs(tmp_path).values()) == 3)
        agent = job.process("worker", 2).parent()
        assert agent == job.process("worker", 1).parent() != job.process("worker", 0).parent()
        agent.kill()
        code, _, err = job.end()
        assert job.left() == []
    assert code == 128 + signal.SIGKILL
    assert "worker 1 was ended by SIGKILL" in err


@pytest.mark.thorough
@pytest.mark.parametrize(("processes", "hosts"), [(400, 1), (48, 3)])
def test_many_processes_take_an_agent_for_each_host_and_a_file_each(processes, hosts):
    """More end at once than signals can wait for the agent, which is no reason for a word."""
    found = launcher_benchmark.measure(processes, hosts)
    assert found.ssh_calls == (hosts if hosts > 1 else 0)
    assert found.supervisors == 1 + hosts
    assert found.launcher_files < processes + 4 * hosts + 20
    assert found.agent_files < 3 * processes / hosts + 20
    assert "Traceback" not in found.errors and "Exception" not in found.errors


WHO = """
import os, stat
from tfdist.world import World
file = os.environ["TFDIST_CLUSTER"]
world = World.detect()
print("TF_CONFIG" in os.environ, stat.filemode(os.stat(file).st_mode), world.rank, world.world_size, file)
print(*(f"{task.role} {task.index} {len(task.host)}" for task in world.tasks), sep=", ")
"""


def test_a_cluster_that_is_too_long_for_a_variable_is_told_in_a_private_file(tmp_path, script, ssh):
    """Two hosts with very long names stand for thousands with usual ones."""
    (tmp_path / "hosts").write_text("\n".join(letter * 70_000 for letter in "ab"))
    environment = ssh | {"TF_CONFIG": json.dumps({"cluster": {"worker": ["x:1"]}, "task": {}})}
    with launch(tmp_path, "--hostfile", "hosts", script(WHO), environment=environment) as job:
        code, _, err = job.end()
    assert code == 0, err
    for rank in range(2):
        place, tasks = outputs(tmp_path)[f"worker-{rank}"].splitlines()
        *place, file = place.split()
        assert place == ["False", "-rw-------", str(rank), "2"]
        assert tasks == "worker 0 70000, worker 1 70000"
        assert not os.path.exists(file)


def limited(tmp_path, limits, *arguments):
    command = f"{limits}; exec {sys.executable} -m tfdist.launch {' '.join(arguments)}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_limit_of_open_files_that_can_be_raised_is(tmp_path, script):
    text = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    done = limited(tmp_path, "ulimit -Sn 70", "--workers", "12", script(text))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 70


def test_one_that_cannot_is_told_with_what_is_needed(tmp_path, script):
    done = limited(tmp_path, "ulimit -n 80", "--workers", "20", script(SAY))
    assert done.returncode == 2
    assert "The launcher of 20 processes on this machine needs 88 open files, and the limit is 80" in done.stderr
    assert "ulimit -n 88" in done.stderr and "Traceback" not in done.stderr
    done = limited(tmp_path, "ulimit -n 90", "--workers", "20", script(SAY))
    assert done.returncode == 2
    assert "The agent of 20 processes on a host needs" in done.stderr and "Traceback" not in done.stderr


LEAVE = """
import json, os, subprocess, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(0 if rank else 1000)
"""


def test_what_an_ended_process_leaves_behind_is_ended_and_what_the_others_have_is_not(tmp_path, script):
    with launch(tmp_path, script(LEAVE)) as job:
        job.wait_for(lambda: sum("child" in text for text in outputs(tmp_path).values()) == 2)
        kept, left = (int(outputs(tmp_path)[f"worker-{rank}"].split()[1]) for rank in range(2))
        job.wait_for(lambda: not psutil.pid_exists(left), seconds=10)
        assert psutil.pid_exists(kept)
        job.signal(signal.SIGINT)
        job.end()
        assert job.left() == []


def test_a_host_that_cannot_be_reached_is_named(tmp_path, script, ssh):
    with launch(tmp_path, "--hosts", "127.0.0.1,unreachable", script(SAY), environment=ssh) as job:
        code, _, err = job.end()
        assert job.left() == []
    assert code == 3
    assert "worker 1 on the host `unreachable` did not start" in err and "No route to host" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0", "x.py"], "`--workers` is 0"),
        (["--restarts", "-1", "x.py"], "`--restarts` is -1"),
        (["--hosts", "-V,-V", "x.py"], "`-V` is not a host"),
        (["--start-seconds", "0", "x.py"], "`--start-seconds` is 0"),
        (["--start-seconds", "inf", "--hosts", "a,b", "x.py"], "`--start-seconds` is inf"),
        (["--ssh-options", "-p '22", "x.py"], "`--ssh-options` is `-p '22`: no closing quotation"),
        ([], "There is no program to start"),
        (["--emit", "lsf", "x.py"], "`--emit` is `lsf`"),
        (["--log-dir", "/dev/null/logs", "x.py"], "cannot be written to `/dev/null/logs`"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path, arguments, said):
    with launch(tmp_path, *arguments) as job:
        code, _, err = job.end()
    assert code == 2
    assert said in err and "hint:" in err and "Traceback" not in err


@pytest.mark.thorough
def test_verify_compares_the_processes_of_a_job_with_one_device(tmp_path):
    arguments = ["--strategy", "multiworker", "--workers", "2", "--model", "mlp", "--dataset", "digits"]
    with RunningJob("verify", *arguments, "--run-dir", tmp_path / "run", module="tfdist", cwd=tmp_path) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    assert "The steps of `multiworker` on 2 replicas equal those of one device." in out
