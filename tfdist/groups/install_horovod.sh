#!/usr/bin/env bash
# Builds Horovod with MPI and Gloo from its source distribution for the TensorFlow in a virtual environment, installs it
# there, and tests it with an all-reduce on two processes. The wheel is cached.
#
# It is a part of the package, for environments that were made without the Makefile of a checkout.
#
# Usage: scripts/install_horovod.sh VENV
#   TFDIST_WHEELS=FOLDER           the folder for wheels; ~/.cache/tfdist/wheels by default
#   HOROVOD_GPU_OPERATIONS=NCCL    build with NCCL; HOROVOD_NCCL_HOME is its folder
set -euo pipefail
venv=$(cd "$1" && pwd)
python=$venv/bin/python
horovod=0.28.1
build=

fail() {
  printf 'Horovod is not installed: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

install_packages() {
  local packages=(cmake g++ libopenmpi-dev openmpi-bin)
  local apt_get=(apt-get -o DPkg::Lock::Timeout=120) # another program may be installing packages
  command -v apt-get > /dev/null || fail "cmake, a C++ compiler or Open MPI's headers are missing" "install them"
  [ "$(id -u)" = 0 ] || fail "cmake, a C++ compiler or Open MPI's headers are missing" \
    "run \`sudo apt-get install ${packages[*]}\`"
  echo "Installing ${packages[*]}"
  ("${apt_get[@]}" update &&
    DEBIAN_FRONTEND=noninteractive "${apt_get[@]}" install --yes --no-install-recommends "${packages[@]}") \
    > "$build/apt.log" 2>&1 || fail "apt-get failed: $(tail -1 "$build/apt.log")" "install ${packages[*]} by hand"
}

adapt() { # patches the source in the folder $1
  # Horovod's operations for XLA use an interface that TensorFlow 2.21 no longer has.
  sed --in-place '/xla_mpi_ops.cc/d' "$1/horovod/tensorflow/CMakeLists.txt"
  # If HOROVOD_TIMELINE_EVERY_RANK is set, each rank writes a timeline to its HOROVOD_TIMELINE, not only the coordinator.
  local block='/if (timeline_env) {/,/should_enable_timeline = true/'
  local condition='is_coordinator || std::getenv("HOROVOD_TIMELINE_EVERY_RANK")'
  sed --in-place "$block s/is_coordinator/$condition/" "$1/horovod/common/operations.cc"
  # The connections of process sets use the interface HOROVOD_GLOO_IFACE, as all others do; not the address that this
  # host's own name resolves to, which is a loopback address on Debian.
  sed --in-place '/::InitializeForProcessSet/,/CreateDevice/ s/= gloo_iface_;/= global_context.gloo_iface_;/' \
    "$1/horovod/common/gloo/gloo_context.cc"
  # If the processes cannot connect, `hvd.init` raises an error; the process is not aborted.
  local loop='[] { try { BackgroundThreadLoop(horovod_global); } catch (const std::exception\& error) {'
  loop+=' if (horovod_global.initialization_done) throw;'
  loop+=' LOG(ERROR) << "Horovod cannot start: " << error.what(); horovod_global.initialization_failed = true; } }'
  sed --in-place "s/std::thread(BackgroundThreadLoop, std::ref(horovod_global))/std::thread($loop)/" \
    "$1/horovod/common/operations.cc"
}

build_wheel() { # into the folder $1
  echo "Building Horovod $horovod for TensorFlow $tensorflow (three minutes on four cores)"
  "$python" -m venv "$build/venv"
  # Horovod's build needs an older setuptools, and imports the TensorFlow that it is built for.
  "$build/venv/bin/python" -m pip install --quiet 'setuptools<81' wheel packaging
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$build/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tensorflow.pth"
  "$build/venv/bin/python" -m pip download --quiet --no-binary :all: --no-deps --no-build-isolation \
    --dest "$build" "horovod==$horovod"
  tar --extract --gzip --directory "$build" --file "$build/horovod-$horovod.tar.gz"
  adapt "$build/horovod-$horovod"
  # The local version lets tfdist recognize a Horovod with these patches.
  HOROVOD_LOCAL_VERSION=tfdist HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    "$build/venv/bin/python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$build/wheel" \
    "$build/horovod-$horovod" > "$build/build.log" 2>&1 || {
    cp "$build/build.log" "$venv/horovod-build.log"
    fail "$(grep -m 1 -E 'error:|Error' "$build/build.log")" "read $venv/horovod-build.log"
  }
  mkdir -p "$1"
  cp "$build"/wheel/*.whl "$1"
}

check() {
  local program='import horovod.tensorflow as hvd, tensorflow as tf; hvd.init(); assert float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum)) == 3'
  local log=$build/check.log
  PATH=$venv/bin:$PATH timeout 120 horovodrun --gloo -np 2 --network-interfaces lo "$python" -c "$program" \
    > "$log" 2>&1 || fail "two processes could not all-reduce over Gloo: $(tail -1 "$log")" "check that \`lo\` is up"
  timeout 120 mpirun --allow-run-as-root --oversubscribe -np 2 "$python" -c "$program" > "$log" 2>&1 ||
    fail "two processes could not all-reduce over MPI: $(tail -1 "$log")" "check that \`mpirun -np 2 hostname\` works"
}

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
command -v cmake > /dev/null && command -v g++ > /dev/null && command -v mpicxx > /dev/null || install_packages

tensorflow=$("$python" -c 'import importlib.metadata as m; print(m.version("tensorflow"))')
version_of_python=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
mpi=$(mpirun --version | sed -n '1s/.* //p')
wheels=${TFDIST_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/tfdist/wheels}
wheels+=/horovod-$horovod-$(declare -f adapt | sha256sum | head -c 8)-tensorflow-$tensorflow-python-$version_of_python
wheels+=-openmpi-$mpi${HOROVOD_GPU_OPERATIONS:+-$HOROVOD_GPU_OPERATIONS}
compgen -G "$wheels/*.whl" > /dev/null || build_wheel "$wheels"
"$python" -m pip install --quiet cloudpickle packaging psutil pyyaml # what Horovod imports
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheels"/*.whl
check
echo "Horovod $horovod works over Gloo and over MPI"
touch "$venv/.horovod"
