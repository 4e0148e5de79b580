"""The findings of `tfdist doctor`, each provoked: by variables, programs, ports, limits, packages and folders."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from tests.processes.jobs import clean_environment
from tfdist import __main__, extras
from tfdist.doctor import __main__ as doctor
from tfdist.doctor import child, engines, gpus, job, machine, network, packages, readiness
from tfdist.doctor.finding import note, ok, problem
from tfdist.doctor.links import Measurement
from tfdist.errors import UnknownNameError

ROOT = Path(__file__).parent.parent
# With `-S`, Python does not know that it is in the environment of the checkout.
INSTALL_HOROVOD = f"bash {ROOT}/tfdist/groups/install_horovod.sh {sys.base_prefix}"
ASK = """
import dataclasses, json, sys
from tfdist.doctor import {module}
print("\\n" + json.dumps([dataclasses.asdict(found) for found in {call}]))
"""


@pytest.fixture(autouse=True)
def _clean_keras():
    """Nothing here touches Keras."""


def ask(module, call=None, inside=(), options=(), limit=None, cwd=None, **variables):
    """The findings of a module, asked in a process of its own: `(subject, state, sentence, hint)` of each."""
    variables = {"PYTHONPATH": str(ROOT), **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run(
        [*inside, sys.executable, *options, "-c", ASK.format(module=module, call=call or f"{module}.findings()")],
        env=clean_environment() | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(one.values()) for one in json.loads(done.stdout.rpartition("\n[")[2].join(["[", ""]))]


def told(findings, state, subject=None):
    """The sentences of one state, and one subject, with their hints."""
    return [f"{one[2]} | {one[3]}" for one in findings if one[1] == state and subject in (None, one[0])]


def program(folder, name, text):
    """A program in a folder, which is returned as the first of the path."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def metadata(folder, package, version, *lines):
    """An installed package, as far as its metadata say."""
    (folder / f"{package}-{version}.dist-info").mkdir()
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}", *lines, ""])
    (folder / f"{package}-{version}.dist-info" / "METADATA").write_text(text)


def without(folder, *packages):
    """A path for `python -S` with all installed packages but some."""
    site = Path(sysconfig.get_path("purelib"))
    (folder / "site").mkdir()
    for path in site.iterdir():
        if not path.name.startswith(packages):
            (folder / "site" / path.name).symlink_to(path)
    return f"{folder / 'site'}:{ROOT}"


def inside_namespace(*options, script):
    """A command that runs another one in new namespaces, after the shell script `script`; skips where it cannot."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare`")
    command = ["unshare", *options, "sh", "-c", f'{script} && exec "$@"', "sh"]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system allows no namespaces: {done.stderr.strip()}")
    return command


class TestPackages:
    def test_the_installed_ones_fit_together(self):
        (found,) = packages.findings()
        assert found.state == "ok"
        assert "tensorflow 2." in found.sentence and found.sentence.endswith("fit together")

    @pytest.fixture
    def path(self, tmp_path):
        return f"{tmp_path}:{ROOT}"

    def test_a_protobuf_that_tensorflow_cannot_use_is_told_with_what_it_needs(self, tmp_path, path):
        metadata(tmp_path, "protobuf", "3.20.3")
        (found,) = [one for one in told(ask("packages", PYTHONPATH=path), "problem") if "tensorflow 2" in one]
        assert "needs protobuf" in found and "and version 3.20.3 is installed | pip install 'protobuf" in found

    def test_a_numpy_that_does_not_fit_is_told(self, tmp_path, path):
        metadata(tmp_path, "numpy", "1.19.0")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        assert any("needs numpy" in one and "version 1.19.0 is installed" in one for one in found)

    def test_a_keras_that_does_not_fit_is_told(self, tmp_path, path):
        metadata(tmp_path, "keras", "2.15.0")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        assert any(one.startswith("tfdist") and "version 2.15.0 is installed" in one for one in found)

    def test_a_profile_plugin_of_another_version_than_its_tool_is_told(self, tmp_path, path):
        metadata(tmp_path, "xprof", "1.0")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        assert any(one.startswith("tensorboard-plugin-profile") and "needs xprof" in one for one in found)

    def test_a_package_that_is_missing_is_told(self, tmp_path, path):
        metadata(tmp_path, "tensorboard", "2.21.0", "Requires-Dist: no-such-package>=3")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        missing = "tensorboard 2.21.0 needs no-such-package, which is not installed"
        assert f"{missing} | pip install 'no-such-package>=3'" in found

    def test_a_python_that_does_not_fit_is_told(self, tmp_path, path):
        metadata(tmp_path, "keras", "3.15.1", "Requires-Python: >=4")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        assert any(one.startswith("keras 3.15.1 needs Python >=4, and this is 3.") for one in found)

    def test_two_packages_that_bring_tensorflow_are_told(self, tmp_path, path):
        metadata(tmp_path, "tensorflow_cpu", "2.20.0")
        found = told(ask("packages", PYTHONPATH=path), "problem")
        assert any("tensorflow-cpu 2.20.0 are installed, which overwrite each other" in one for one in found)

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("TF_USE_LEGACY_KERAS", "1"), ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")],
    )
    def test_a_variable_that_changes_keras_or_protobuf_is_noted(self, variable, value):
        found = ask("packages", **{variable: value})
        assert [one[1] for one in found] == ["ok", "note"] and variable in found[1][2]

    def test_a_clone_that_is_not_installed_knows_what_it_requires(self):
        assert extras.project_table()["dependencies"] and extras.project_table()["requires-python"]


class TestEngines:
    @pytest.mark.thorough
    def test_what_cannot_be_loaded_or_dies_is_told_and_nothing_else_ends(self, tmp_path):
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").touch()
        symbol = "mpi_lib.so: undefined symbol: _ZN10tensorflow8OpKernel11TraceStringE"
        (tmp_path / "horovod" / "tensorflow.py").write_text(f"raise ImportError({symbol!r})\n")
        for name, version in (("mpi4py", "4.0"), ("horovod", "0.28.1")):
            metadata(tmp_path, name, version)
        found = ask("engines", PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert told(found, "ok", "TensorFlow")
        (mpi,) = told(found, "problem", "MPI")
        assert mpi.startswith("The process that loads mpi4py was killed by SIGSEGV")
        (horovod,) = told(found, "problem", "Horovod")
        assert "cannot be loaded with TensorFlow 2." in horovod and symbol in horovod and "make horovod" in horovod

    def test_a_tensorflow_that_does_not_load_is_told_once(self, tmp_path):
        (tmp_path / "tensorflow.py").write_text("raise ImportError('libcublas.so.12: cannot open it')\n")
        found = ask("engines", PYTHONPATH=f"{tmp_path}:{ROOT}")
        (tensorflow,) = told(found, "problem", "TensorFlow")
        assert "libcublas.so.12" in tensorflow and "pip install --force-reinstall 'tensorflow" in tensorflow
        others = [*told(found, "problem", "MPI"), *told(found, "problem", "Horovod")]
        assert all("not tried, because TensorFlow does not load" in one for one in others)

    def test_keras_on_another_backend_is_told(self):
        (found,) = told(
            ask("engines", "engines.tensorflow_findings(engines.load('tensorflow'))", KERAS_BACKEND="torch"), "problem"
        )
        assert "`KERAS_BACKEND` is `torch`" in found

    @pytest.mark.thorough
    def test_a_module_that_hides_the_installed_one_is_told(self, tmp_path):
        call = "engines.tensorflow_findings(engines.load('tensorflow'))"
        metadata(tmp_path, "keras", "3.15.9")
        (found,) = told(ask("engines", call, PYTHONPATH=f"{tmp_path}:{ROOT}"), "problem")
        assert "`keras` is imported from" in found and "and version 3.15.9 is installed" in found

    def test_a_library_that_hangs_is_given_up(self, tmp_path):
        (tmp_path / "tensorflow.py").write_text("import time\ntime.sleep(1000)\n")
        call = "[engines.ok('', engines.load('tensorflow', 2.0).error)]"
        (found,) = told(ask("engines", call, PYTHONPATH=f"{tmp_path}:{ROOT}"), "ok")
        assert "The process that loads tensorflow did not finish within 2 s" in found

    def test_what_is_not_installed_and_few_need_is_noted_with_the_command_that_installs_it(self, tmp_path):
        path = without(tmp_path, "mpi4py", "horovod")
        call = "engines.mpi_findings(engines.load('mpi4py')) + engines.horovod_findings(engines.load('horovod'))"
        found = ask("engines", call, options=["-S"], PYTHONPATH=path)
        mpi, horovod = told(found, "note")
        assert mpi.startswith("mpi4py is not installed") and mpi.endswith("| pip install 'mpi4py>=4'")
        assert horovod.startswith("horovod is not installed") and horovod.endswith(f"| {INSTALL_HOROVOD}")

    @pytest.mark.thorough
    def test_an_mpi4py_without_its_library_is_told(self):
        call = "engines.mpi_findings(engines.load('mpi4py'))"
        pytest.importorskip("mpi4py")
        (found,) = told(ask("engines", call, MPI4PY_LIBMPI="/no/such/library"), "problem")
        assert found.startswith("mpi4py finds no MPI library: ") and "apt-get install openmpi-bin" in found

    @pytest.mark.parametrize(
        ("built_with", "state", "told_of"),
        [
            (["MPI", "Gloo", "NCCL"], "ok", "it was built with MPI, Gloo, NCCL"),
            (["MPI"], "note", "it was built with MPI, but without Gloo"),
            (["NCCL"], "problem", "built with neither MPI nor Gloo"),
        ],
    )
    def test_what_horovod_was_built_with_is_told(self, built_with, state, told_of):
        (found,) = engines.horovod_findings(engines.LoadResult({"built_with": built_with}))
        assert found.state == state and told_of in found.sentence

    @pytest.mark.parametrize(
        ("said", "state", "told_of"),
        [
            ("HYDRA build details:\n    Version: 4.0.2", "problem", "belongs to MPICH (`HYDRA build details:`)"),
            ("Intel(R) MPI Library for Linux* OS, Version 2021", "problem", "belongs to Intel(R) MPI"),
            ("something else", "problem", "belongs to another MPI (`something else`)"),
            ("mpirun (Open MPI) 4.1.4", "ok", "belongs to mpirun (Open MPI) 4.1.4"),
        ],
    )
    def test_an_mpirun_of_another_library_than_mpi4pys_is_told(self, tmp_path, said, state, told_of):
        path = program(tmp_path, "mpirun", f"echo '{said}'")
        (found,) = told(ask("engines", "engines.mpirun_findings('Open MPI')", PATH=path), state)
        assert told_of in found and (state == "ok" or "mpi4py is linked with Open MPI" in found)

    def test_an_mpirun_that_fits_and_that_the_launcher_cannot_use_is_noted(self, tmp_path):
        path = program(tmp_path, "mpirun", "echo HYDRA")
        (found,) = told(ask("engines", "engines.mpirun_findings('MPICH')", PATH=path), "note")
        assert "tfdist's launcher supports only Open MPI" in found

    def test_where_there_is_no_mpirun_the_command_that_installs_it_is_told(self, tmp_path):
        (found,) = told(ask("engines", "engines.mpirun_findings('Open MPI')", PATH=tmp_path), "problem")
        assert "no `mpirun` on the path" in found and "apt-get install openmpi-bin" in found

    def test_an_mpirun_that_hangs_is_given_up(self, tmp_path):
        path = program(tmp_path, "mpirun", "sleep 1000")
        (found,) = told(ask("engines", "[engines.ok('', engines.mpirun(1.0))]", PATH=path), "ok")
        assert "`mpirun --version` did not finish within 1 s" in found


class TestChild:
    def test_it_is_ended_with_all_that_it_started(self):
        ended = child.run(["sh", "-c", "sleep 1000 & echo $!; wait"], 0.5)
        assert ended.code is None and ended.description() == "did not finish within 0.5 s"
        deadline = time.monotonic() + 10
        while psutil.pid_exists(int(ended.out)) and psutil.Process(int(ended.out)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_program_that_is_not_there_is_told(self):
        assert "No such file" in child.run(["/no/such/program"], 1.0).description()

    def test_it_is_in_no_job(self, monkeypatch):
        for name in ("TF_CONFIG", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK", "SLURM_PROCID"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
        assert not {"TF_CONFIG", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK"} & set(child.environment())
        assert child.environment()["OMPI_MCA_btl"] == "self,tcp"


class TestGpus:
    LISTED = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'"

    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory):
        """A `nvidia-smi` that lists two GPUs, and a NCCL."""
        folder = tmp_path_factory.mktemp("gpus")
        return program(folder, "nvidia-smi", f"{self.LISTED}; echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'")

    @pytest.mark.thorough
    def test_those_that_tensorflow_does_not_see_are_told_with_its_cuda_libraries(self, path):
        shown = ("env", "--unset=CUDA_VISIBLE_DEVICES")
        first, nccl = told(ask("gpus", inside=shown, PATH=path), "problem")
        assert "TensorFlow sees 0 of the 2 GPUs of this machine (GPU 0: NVIDIA H100, GPU 1: NVIDIA H100)" in first
        assert "pip install 'tensorflow[and-cuda]==2." in first
        assert nccl.startswith("NCCL, which GPUs use to exchange tensors, does not load")

    @pytest.mark.parametrize(
        ("seen", "present", "state", "told_of"),
        [
            ([], [], "ok", "This machine has no NVIDIA GPU"),
            (["NVIDIA H100"], ["GPU 0: NVIDIA H100"], "ok", "sees 1: NVIDIA H100; it was built for CUDA 12.5"),
            (["NVIDIA H100"], ["GPU 0: NVIDIA H100", "GPU 1: NVIDIA H100"], "problem", "sees 1 of the 2 GPUs"),
        ],
    )
    def test_what_tensorflow_sees_is_compared_with_what_the_driver_lists(
        self, monkeypatch, seen, present, state, told_of
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        loaded = engines.LoadResult({"gpus": seen, "cuda": "12.5", "built_with_cuda": True})
        (found,) = gpus.tensorflow_findings(loaded, present)
        assert found.state == state and told_of in found.sentence

    def test_a_tensorflow_without_cuda_is_told(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        loaded = engines.LoadResult({"gpus": [], "built_with_cuda": False})
        (found,) = gpus.tensorflow_findings(loaded, ["GPU 0: NVIDIA H100"])
        assert found.is_problem and found.sentence.endswith(": it was built without CUDA")

    def test_those_that_are_hidden_are_noted(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        loaded = engines.LoadResult({"gpus": ["NVIDIA H100"], "cuda": "12.5", "built_with_cuda": True})
        (found,) = gpus.tensorflow_findings(loaded, ["GPU 0: NVIDIA H100", "GPU 1: NVIDIA H100"])
        assert (
            found.state == "note" and "`CUDA_VISIBLE_DEVICES` is `1`: TensorFlow sees 1 of the 2 GPUs" in found.sentence
        )

    def test_a_driver_that_fails_is_told(self, tmp_path):
        path = program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: version mismatch'; exit 18")
        (found,) = told(ask("gpus", "gpus.by_driver()[1]", PATH=path), "problem")
        assert "`nvidia-smi` ended with exit code 18: Failed to initialize NVML" in found

    @pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
    def test_the_version_of_nccl_is_told(self, tmp_path):
        (tmp_path / "nccl.c").write_text("int ncclGetVersion(int *version) { *version = 22703; return 0; }\n")
        library = tmp_path / "libnccl.so.2"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nccl.c"], check=True)
        assert told(ask("gpus", "gpus.nccl()", LD_LIBRARY_PATH=tmp_path), "ok") == ["NCCL 2.27.3 loads | "]


class TestMachine:
    def test_what_suffices_is_told_as_such(self):
        found = ask("machine")
        assert {"cores", "memory", "open files", "clock"} <= {one[0] for one in found if one[1] == "ok"}

    def test_fewer_cores_than_the_machine_has_are_noted(self):
        if len(os.sched_getaffinity(0)) < 2:
            pytest.skip("this process has one core")
        found = ask("machine", limit=lambda: os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]))
        assert f"This process may use 1 of the {os.cpu_count()} cores" in told(found, "note", "cores")[0]

    @pytest.mark.parametrize("name", machine.THREADS)
    def test_a_variable_that_sets_threads_is_noted(self, name):
        assert f"`{name}` is `1`" in told(ask("machine", **{name: 1}), "note", "cores")[-1]

    @pytest.mark.parametrize(
        ("files", "own"),
        [
            ({"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/memory.max": "1073741824"}, "0::/a/b"),
            (
                {
                    "a/b/cpu.max": "300000 100000",
                    "a/cpu.max": "150000 100000",
                    "a/b/memory.max": "1073741824",
                    "a/memory.max": "2147483648",
                },
                "0::/a/b",
            ),
            # In a container the limits are at the top, whatever the name that the process knows.
            ({"cpu.max": "150000 100000", "memory.max": "1073741824"}, "0::/docker/0123"),
            (
                {
                    "cpu/x/cpu.cfs_quota_us": "150000",
                    "cpu/x/cpu.cfs_period_us": "100000",
                    "memory/x/memory.limit_in_bytes": "1073741824",
                    "memory/memory.limit_in_bytes": "9223372036854771712",
                },
                "5:cpu,cpuacct:/x\n3:memory:/x",
            ),
        ],
        ids=["version 2", "the tightest counts", "a container", "version 1"],
    )
    def test_the_limits_of_a_container_are_read_as_the_kernel_writes_them(self, tmp_path, files, own):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / "own").write_text(f"{own}\n")
        found = machine.limits_of_cgroup(tmp_path, tmp_path / "own")
        assert found == machine.Limits(cpus=1.5, memory_bytes=1 << 30)
        cores, memory = machine.core_findings(found, 16, 16), machine.memory_findings(found, 64 << 30, 32 << 30)
        assert "may compute on 1.5 cores at a time" in told(map(values, cores), "note")[0]
        assert "may use 1.0 GiB of the 64.0 GiB" in told(map(values, memory), "note")[0]

    def test_no_limit_is_none(self, tmp_path):
        (tmp_path / "cpu.max").write_text("max 100000\n")
        (tmp_path / "memory.max").write_text("max\n")
        assert machine.limits_of_cgroup(tmp_path, tmp_path / "none") == machine.Limits()

    def test_little_memory_is_a_problem(self):
        (found,) = machine.memory_findings(machine.Limits(), 2 << 30, 100 << 20)
        assert found.is_problem and found.sentence == "0.1 GiB are available"

    def test_a_limit_of_addresses_is_noted(self):
        found = ask("machine", limit=lambda: resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30)))
        assert "may reserve 32.0 GiB of address space" in told(found, "note", "memory")[0]

    @pytest.mark.parametrize(("count", "state"), [(100, "problem"), (400, "note")])
    def test_few_open_files_are_told(self, count, state):
        found = ask("machine", limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count)))
        assert f"A process may open {count} files" in told(found, state, "open files")[0]

    def test_little_shared_memory_is_noted(self):
        small = inside_namespace("-rm", script="mount -t tmpfs -o size=1m none /dev/shm")
        found = told(ask("machine", inside=small), "note", "shared memory")
        assert "`/dev/shm` has 1 MiB free" in found[0] and "--shm-size=1g" in found[0]

    def test_a_clock_that_is_behind_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        assert [one.state for one in machine.clock(tmp_path / "file")] == ["ok"]
        os.utime(tmp_path / "file", (4e9, 4e9))
        (found,) = machine.clock(tmp_path / "file")
        assert found.is_problem and "was written at 2096-10-02" in found.sentence


class TestNetwork:
    def test_a_machine_on_which_processes_can_connect(self):
        assert {"loopback", "proxies"} <= {one[0] for one in ask("network") if one[1] == "ok"}

    def test_a_loopback_that_is_down_is_told(self):
        found = told(ask("network", "network.loopback()", inside=inside_namespace("-rn", script="true")), "problem")
        assert "cannot connect to another process over `localhost`" in found[0] and "ip link set lo up" in found[0]

    @pytest.mark.parametrize(
        ("script", "told_of"),
        [
            ("hostname no-such-host.invalid", "`no-such-host.invalid`, the name of this host, has no address"),
            (
                "hostname elsewhere && echo '203.0.113.9 elsewhere' > hosts && mount --bind hosts /etc/hosts",
                "`elsewhere`, the name of this host, resolves to 203.0.113.9, which no network interface here has",
            ),
        ],
        ids=["no address", "an address of another machine"],
    )
    def test_a_host_name_that_does_not_lead_here_is_noted(self, tmp_path, script, told_of):
        inside = inside_namespace("-rmu", script=f"cd {tmp_path} && {script}")
        assert told_of in told(ask("network", inside=inside), "note", "host name")[0]

    @pytest.mark.parametrize(("ports", "state"), [("10000 60999", "note"), ("32768 60999", "ok")])
    def test_ports_that_slurms_jobs_share_with_other_programs_are_noted(self, ports, state):
        inside = inside_namespace("-rn", script=f"echo '{ports}' > /proc/sys/net/ipv4/ip_local_port_range")
        (found,) = told(ask("network", inside=inside), state, "ports")
        assert (
            f"The system assigns ephemeral ports from {ports.replace(' ', ' to ')}, and jobs under Slurm listen on"
            in found
        )

    @pytest.mark.parametrize("name", ["https_proxy", "http_proxy", "grpc_proxy"])
    def test_a_proxy_that_grpc_would_take_is_told_with_the_exception_to_set(self, name):
        (found,) = told(ask("network", **{name: "http://proxy:3128", "no_proxy": "example.org"}), "problem")
        assert f"`{name}` is set, and `no_proxy` does not exempt `localhost`" in found
        assert found.endswith("| export no_proxy=example.org,localhost")

    def test_the_hosts_of_a_job_are_to_be_excepted_too(self):
        config = tf_config("node1.cluster:2222", "10.0.0.2:2222")
        excepted = {"https_proxy": "http://proxy", "TF_CONFIG": config}
        (found,) = told(ask("network", no_proxy="localhost", **excepted), "problem")
        assert "does not exempt `node1.cluster`, `10.0.0.2`" in found
        assert told(ask("network", no_proxy="localhost,.cluster,10.0.0.0/8", **excepted), "problem") == []

    def test_names_in_capitals_are_not_grpcs(self):
        assert told(ask("network", HTTPS_PROXY="http://proxy:3128"), "problem") == []

    def test_a_missing_ssh_is_noted(self, tmp_path):
        (found,) = told(ask("network", PATH=tmp_path), "note", "ssh")
        assert "There is no `ssh` on the path" in found

    def test_a_look_up_that_takes_too_long_is_given_up(self):
        network.call_within([lambda: time.sleep(1000)], 0.1)


@pytest.fixture
def free_ports():
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("", 0))
        return [each.getsockname()[1] for each in (one, two)]


def tf_config(*workers, index=0):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def values(finding):
    return finding.subject, finding.state, finding.sentence, finding.hint


class TestJob:
    def found(self, **variables):
        return [values(one) for one in job.findings(variables)]

    def test_a_process_alone_is_told(self):
        assert told(self.found(), "ok", "job")[0].startswith("No variable describes a job")

    def test_a_tf_config_that_is_not_json_is_told(self):
        (found,) = told(self.found(TF_CONFIG="{'cluster'"), "problem")
        assert found.startswith("`TF_CONFIG` is `{'cluster'`, which is not JSON") and '"host:port"' in found

    def test_a_job_that_can_be_is_told_with_the_rank(self, free_ports):
        one, two = free_ports
        found = self.found(TF_CONFIG=tf_config(f"localhost:{one}", f"localhost:{two}", index=1))
        assert told(found, "ok", "job") == ["TF_CONFIG makes this process rank 1 of 2 | "]

    def test_an_evaluator_is_told_apart(self, free_ports):
        config = tf_config(f"localhost:{free_ports[0]}").replace('"type": "worker"', '"type": "evaluator"')
        (found,) = told(self.found(TF_CONFIG=config), "ok", "job")
        assert found.startswith("TF_CONFIG makes this process evaluator 0, which takes no part in the training")

    def test_a_port_in_use_is_told(self, free_ports):
        with socket.create_server(("", free_ports[0])):
            config = tf_config(*(f"localhost:{port}" for port in free_ports))
            (found,) = told(self.found(TF_CONFIG=config), "problem")
        assert found.startswith(f"Port {free_ports[0]} of this process, worker 0 (localhost:{free_ports[0]}), cannot")
        assert "Address already in use" in found

    def test_a_host_without_an_address_is_told(self, free_ports):
        config = tf_config(f"no-such-host.invalid:{free_ports[0]}", f"127.0.0.2:{free_ports[1]}", index=0)
        config = config.replace("127.0.0.2", "nor-this.invalid")
        found = told(self.found(TF_CONFIG=config), "problem")
        assert "names `no-such-host.invalid`, `nor-this.invalid`, which this machine cannot resolve" in found[0]

    def test_an_own_address_that_is_another_machines_is_told(self, free_ports):
        config = tf_config(f"203.0.113.9:{free_ports[0]}", f"203.0.113.8:{free_ports[1]}")
        (found,) = told(self.found(TF_CONFIG=config), "problem")
        assert "`203.0.113.9` resolves to 203.0.113.9, which no network interface of this machine has" in found

    def test_several_descriptions_at_once_are_noted(self, free_ports):
        config = tf_config(*(f"localhost:{port}" for port in free_ports))
        (found,) = told(self.found(TF_CONFIG=config, OMPI_COMM_WORLD_RANK="0", SLURM_PROCID="1"), "note", "job")
        assert "described by TF_CONFIG, and also by `OMPI_COMM_WORLD_RANK`, `SLURM_PROCID`, which are ignored" in found

    def test_variables_of_slurm_that_contradict_each_other_are_told(self):
        (found,) = told(self.found(SLURM_PROCID="5", SLURM_NTASKS="2", SLURM_JOB_NODELIST="n[1-2]"), "problem")
        assert "`SLURM_PROCID` is 5 of `SLURM_NTASKS` 2" in found

    def test_an_allocation_of_slurm_without_a_step_is_noted(self):
        (found,) = told(self.found(SLURM_JOB_ID="7"), "note", "Slurm")
        assert "in the allocation of job 7 but not in one of its steps" in found and "`srun`" in found

    def test_slurm_is_found_by_its_program(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", program(tmp_path, "srun", "true"))
        assert f"`{tmp_path}/srun` starts the processes of a job" in told(self.found(), "ok", "Slurm")[0]


class TestFolders:
    def test_the_prepared_datasets_are_named(self, tmp_path):
        (tmp_path / "mnist" / "3.0.1").mkdir(parents=True)
        (tmp_path / "mnist" / "3.0.1" / "dataset_info.json").touch()
        found = told(ask("folders", TFDS_DATA_DIR=tmp_path, cwd=tmp_path), "ok", "datasets")
        assert found[0].startswith(f"`{tmp_path}` has mnist, and")

    def test_a_folder_of_datasets_that_does_not_exist_is_told(self, tmp_path):
        (found,) = told(ask("folders", TFDS_DATA_DIR=tmp_path / "none", cwd=tmp_path), "problem")
        assert f"the data folder, from TFDS_DATA_DIR, `{tmp_path}/none` does not exist" in found

    def test_what_cannot_be_written_is_told(self, tmp_path):
        data, work = tmp_path / "data", tmp_path / "work"
        for folder in (data, work):
            folder.mkdir()
        inside = read_only(data, work)
        variables = {"TFDS_DATA_DIR": data, "TFDIST_CACHE_DIR": data / "cache", "TMPDIR": tmp_path}
        found = ask("folders", inside=[*inside, "sh", "-c", f'cd {work} && exec "$@"', "sh"], **variables)
        assert "others cannot be prepared there: Read-only file system" in told(found, "note", "datasets")[0]
        assert f"Nothing can be written to `{work}/runs`: Read-only file system" in told(found, "problem", "runs")[0]
        assert f"Nothing can be written to `{data}/cache`" in told(found, "note", "caches")[0]
        assert told(found, "ok", "temporary files")

    def test_a_full_disk_is_told(self, tmp_path):
        (tmp_path / "full").mkdir()
        full = tmp_path / "full"
        script = f"mount -t tmpfs -o size=64k none {full} && (head -c 1m /dev/zero > {full}/file 2> /dev/null || true)"
        inside = inside_namespace("-rm", script=f"{script} && cd {full}")
        found = ask("folders", inside=inside, TFDS_DATA_DIR=full)
        assert "No space left on device" in told(found, "note", "datasets")[0]
        assert "No space left on device" in told(found, "problem", "runs")[0]

    def test_little_space_is_noted(self, tmp_path):
        small = tmp_path / "small"
        small.mkdir()
        inside = inside_namespace("-rm", script=f"mount -t tmpfs -o size=100m none {small} && cd {small}")
        found = ask("folders", inside=inside, TFDS_DATA_DIR=tmp_path)
        assert f"`{small}/runs` has 0.1 GiB free" in told(found, "note", "runs")[0]

    def test_a_folder_that_is_a_file_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        found = ask("folders", TFDIST_CACHE_DIR=tmp_path / "file" / "caches", TFDS_DATA_DIR=tmp_path)
        assert f"`{tmp_path}/file` is not a folder" in told(found, "note", "caches")[0]

    def test_a_working_folder_that_was_removed_is_told(self, tmp_path):
        gone = ["sh", "-c", f'mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec "$@"', "sh"]
        (found,) = told(ask("folders", inside=gone, TFDS_DATA_DIR=tmp_path), "problem", "runs")
        assert found.startswith("The working folder has been removed")

    def test_no_folder_for_temporary_files_is_told(self, tmp_path):
        readable = " && ".join(
            f"mount --bind -o ro {folder} {folder}"
            for folder in ("/tmp", "/var/tmp", "/usr/tmp")
            if Path(folder).is_dir()
        )
        inside = inside_namespace("-rm", script=f"{readable} && cd /proc")
        measured = ask("links", "links.findings([links.between_two_processes('multiworker')])", inside=inside)
        assert "they could not be started" in told(measured, "problem", "all-reduce")[0]
        (found,) = told(ask("folders", inside=inside, TFDS_DATA_DIR=ROOT), "problem", "temporary files")
        assert "Nothing can be written to `/tmp`" in found and "set `TMPDIR`" in found


def read_only(*folders):
    """A command that runs another one where these folders cannot be written, by root neither."""
    mounts = [f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in folders]
    return inside_namespace("-rm", script=" && ".join(mounts))


class TestReadiness:
    def test_what_is_not_says_why_and_the_one_command(self, tmp_path):
        path = without(tmp_path, "mpi4py", "horovod")
        done = run_code(READY, "-S", PYTHONPATH=path, https_proxy="http://proxy:1")
        found = json.loads(done.stdout.splitlines()[-1])
        not_ready = {name: (one["reason"], one["command"]) for name, one in found.items() if not one["ready"]}
        assert not_ready.pop("horovod") == ("horovod is not installed", INSTALL_HOROVOD)
        for name in ("mpi", "mpi_split"):
            assert not_ready.pop(name) == ("mpi4py is not installed", "pip install 'mpi4py>=4'")
        assert {one[1] for one in not_ready.values()} == {"export no_proxy=localhost"}
        assert set(not_ready) == {"multiworker", "parameter_server"}

    @pytest.mark.thorough
    def test_what_is_measured_and_fails_is_not_ready(self):
        tried = "Measurement('sockets', 'multiworker', None, 'they did not end', 'do this')"
        done = run_code(f"{IMPORTS}print(readiness.of('multiworker', [{tried}]))")
        assert "all-reduce over sockets: they did not end', command='do this'" in done.stdout

    @pytest.mark.thorough
    def test_few_open_files_keep_those_of_several_processes_from_running(self):
        few = ("prlimit", "--nofile=100:100") if shutil.which("prlimit") else pytest.skip("there is no `prlimit`")
        code = f"{IMPORTS}print([readiness.of(name).ready for name in ('single', 'multiworker')])"
        assert "[True, False]" in run_code(code, inside=few).stdout

    @pytest.mark.thorough
    def test_in_a_job_of_several_processes_those_of_one_process_are_not_ready(self, free_ports):
        config = tf_config(*(f"localhost:{port}" for port in free_ports))
        done = run_code(READY, TF_CONFIG=config)
        found = json.loads(done.stdout.splitlines()[-1])
        alone = {name for name, one in found.items() if "trains in one" in one["reason"]}
        assert alone == {"single", "mirrored", "custom", "hogwild"} and not any(found[name]["ready"] for name in alone)
        reason, command = found["mirrored"]["reason"], found["mirrored"]["command"]
        assert reason.startswith("TF_CONFIG describes 2 processes, and `mirrored` trains in one: `tfdist train`")
        assert command.startswith("unset TF_CONFIG to train") and "multiworker" in command
        assert found["multiworker"]["ready"] and found["pipeline"]["ready"]

    @pytest.mark.thorough
    def test_a_pipeline_has_a_stage_in_each_process_of_a_job_and_needs_what_jobs_need(self, free_ports):
        config = tf_config(*(f"no-such-host.invalid:{port}" for port in free_ports))
        code = f"{IMPORTS}print(readiness.of('pipeline').reason)"
        assert "`no-such-host.invalid`" in run_code(code, TF_CONFIG=config).stdout

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(UnknownNameError, match="did you mean `mirrored`"):
            readiness.of("miror")


IMPORTS = "import dataclasses, json; from tfdist.doctor import readiness; from tfdist.doctor.links import Measurement; "
READY = f"{IMPORTS}print(json.dumps({{one.strategy: dataclasses.asdict(one) for one in readiness.of_all()}}))"


def run_code(code, *options, inside=(), **variables):
    done = subprocess.run(
        [*inside, sys.executable, *options, "-c", code],
        env=clean_environment() | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


class TestPage:
    FINDINGS = (
        ok("memory", "4 GiB"),
        note("host name", "`x` has no address", "add it"),
        problem("job", "[bold]`TF_CONFIG`[/bold] is `{`", "unset it"),
    )
    STRATEGIES = (readiness.Readiness("single", True), readiness.Readiness("horovod", False, "No.", "make horovod"))

    def test_each_finding_and_each_hint_is_a_line_of_text(self, capsys):
        doctor.show_report(self.FINDINGS, self.STRATEGIES)
        assert capsys.readouterr().out.splitlines() == [
            "ok         memory     4 GiB",
            "note       host name  `x` has no address",
            "                      hint: add it",
            "problem    job        [bold]`TF_CONFIG`[/bold] is `{`",
            "                      hint: unset it",
            "",
            "ready      single",
            "not ready  horovod  No.",
            "                    hint: make horovod",
            "",
            "1 problem (job), 1 note; 1 of 2 strategies are ready",
        ]

    def test_on_a_terminal_a_sentence_is_broken_beside_its_subject(self, capsys, monkeypatch):
        for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "60", "TERM": "xterm"}.items():
            monkeypatch.setenv(name, value)
        doctor.show_report([ok("memory", "a sentence of words that is longer than a line is wide")], self.STRATEGIES)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert lines[:2] == ["ok         memory  a sentence of words that is longer than a", " " * 19 + "line is wide"]

    def test_the_json_has_the_same(self):
        found = json.loads(
            doctor.report_as_json(self.FINDINGS, [Measurement("MPI", "mpi_split", None, "no")], self.STRATEGIES)
        )
        assert found["findings"][1] == {
            "subject": "host name",
            "state": "note",
            "sentence": "`x` has no address",
            "hint": "add it",
        }
        assert found["strategies"][1]["command"] == "make horovod" and found["all_reduce"] == []


class TestCommand:
    def doctor(self, *options, **variables):
        return subprocess.run(
            [sys.executable, "-m", "tfdist", "doctor", "--no-all-reduce", *options],
            env=clean_environment() | {"PYTHONPATH": str(ROOT)} | variables,
            cwd=variables["TMPDIR"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    @pytest.mark.thorough
    def test_a_problem_ends_with_exit_code_1_and_a_page_for_programs_is_json(self, tmp_path):
        done = self.doctor("--json", TF_CONFIG="{", TMPDIR=str(tmp_path))
        assert (done.returncode, done.stderr) == (1, "")
        found = json.loads(done.stdout)
        assert [one["subject"] for one in found["findings"] if one["state"] == "problem"] == ["job"]
        # `tfdist train` refuses to start any.
        assert not any(one["ready"] for one in found["strategies"])
        assert all(
            "`TF_CONFIG` is `{`" in one["reason"] for one in found["strategies"] if one["command"] != "make horovod"
        )

    @pytest.mark.thorough
    def test_where_nothing_is_wrong_it_ends_with_exit_code_0_and_strategies_are_ready(self, tmp_path):
        done = self.doctor(TMPDIR=str(tmp_path), TFDS_DATA_DIR=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        ready = {line[1] for line in lines if line and line[0] == "ready"}
        assert {"single", "mirrored", "custom", "pipeline", "multiworker", "parameter_server"} <= ready
        assert done.stdout.splitlines()[-1].startswith("0 problems, ")

    def test_a_subject_that_fails_is_told_and_the_others_too(self, tmp_path):
        """On some systems the list of network interfaces may not be read."""
        (tmp_path / "psutil.py").write_text(FORBIDDEN)
        call = "__main__.collect(__main__.network.findings, 'network') + __main__.collect(__main__.job.findings, 'job')"
        found = ask("__main__", call, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert "This check failed: PermissionError: [Errno 13] no list" in told(found, "problem", "network")[0]
        assert told(found, "ok", "job")

    def test_a_subject_that_does_not_answer_is_given_up(self):
        (found,) = doctor.collect(lambda: time.sleep(1000), "folders", 0.1)
        assert found.is_problem and found.sentence == "This check did not finish within 0.1 s"


FORBIDDEN = """
import sys
own = sys.path.pop(1)
del sys.modules["psutil"]
import psutil

def net_if_addrs():
    raise PermissionError(13, "no list of interfaces")

psutil.net_if_addrs = net_if_addrs
sys.path.insert(1, own)
"""


class TestEnvironment:
    def printed(self, **variables):
        done = CliRunner(env=variables).invoke(__main__.main, ["env"])
        assert done.exit_code == 0
        return dict(line.split(maxsplit=1) for line in done.output.splitlines())

    def test_versions_the_machine_and_the_job_are_there(self):
        found = self.printed(TF_CONFIG=tf_config("10.0.0.1:2222"))
        assert found["tensorflow"].startswith("2.") and found["python"].startswith("3.")
        assert {"keras", "numpy", "protobuf", "mpirun", "platform", "cores", "memory", "gpus"} <= set(found)
        assert found["source"] == "TF_CONFIG"

    def test_secrets_are_left_out(self):
        variables = {
            "HOROVOD_SECRET_KEY": "abc",
            "TFDS_TOKEN": "abc",
            "https_proxy": "http://me:abc@proxy:3128",
            "OTHER": "abc",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        found = dict(doctor.variables(variables))
        assert found == {
            "HOROVOD_SECRET_KEY": "(left out)",
            "TFDS_TOKEN": "(left out)",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "https_proxy": "http://...@proxy:3128",
        }

    def test_a_job_that_cannot_be_does_not_keep_it_from_being_printed(self):
        found = self.printed(TF_CONFIG="{")
        assert "not JSON" in found["source"]


@pytest.mark.parametrize(
    ("load", "cores", "state"), [(0.3, 2, "ok"), (3.0, 2, "ok"), (20.0, 2, "note"), (20.0, 16, "ok")]
)
def test_a_load_well_above_the_cores_is_a_note(load, cores, state):
    (finding,) = machine.load_findings(load, cores)
    assert (finding.subject, finding.state) == ("load", state)
    if state == "note":
        assert finding.sentence.startswith("The load of this machine is 20.0, and it has 2 cores") and finding.hint
