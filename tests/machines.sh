#!/usr/bin/env bash
# Makes the machines that machines.py tries the program on, in a folder that it is then given.
#
#   sudo tests/machines.sh FOLDER [PART...]
#
# Parts, all by default, in this order; what is there already stays as it is:
#   python3.10 python3.12 python3.13
#       virtual environments with requirements.txt. These Pythons are on PATH, or pyenv has them. llama.cpp is compiled
#       once, for the first of them; CMAKE_ARGS counts as always
#   builder
#       a Debian with the image's compiler, which makes the next two
#   x86_64 aarch64
#       the image's llama.cpp for that architecture, in a Debian with just what the engine needs; ARM's is
#       cross-compiled. The settings come from the Dockerfile, the version from requirements.txt
#   gcc gcc-without-amx gcc-of-the-image clang
#       llama.cpp's native code for this processor by the compilers that are installed here, and by the image's
#
# Needs root and Debian's packages mmdebstrap and qemu-user; for the last parts g++, clang, libomp-dev, cmake and
# ninja-build. On two cores x86_64 and aarch64 take about 10 minutes each, the others 1 to 5.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
project=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1/compilers"
folder=$(cd "$1" && pwd)
shift
all="python3.10 python3.12 python3.13 builder x86_64 aarch64 gcc gcc-without-amx gcc-of-the-image clang"
suite=trixie # the image's Debian
builder=$folder/builder
engine=$(grep '^llama-cpp-python' "$project/requirements.txt")

environment() { # python3.12
  python=$1
  if ! "$python" -c '' 2>/dev/null; then
    python=$(printf '%s\n' "$(pyenv root)"/versions/"${1#python}".*/bin/python | sort -V | tail -n 1)
  fi
  "$python" -m venv "$folder/.$1"
  # pip keeps what it has compiled for one version of Python only, though this wheel fits all
  pip=("$folder/.$1/bin/python" -m pip)
  [ -d "$folder/wheels" ] || "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$engine"
  "${pip[@]}" install --quiet --find-links "$folder/wheels" -r "$project/requirements.txt"
  mv "$folder/.$1" "$folder/$1"
}

make_builder() {
  mmdebstrap --quiet --variant=minbase \
    --include=ca-certificates,g++,g++-aarch64-linux-gnu,cmake,ninja-build,python3-pip "$suite" "$folder/.builder"
  cp /etc/ssl/certs/ca-certificates.crt "$folder/.builder/etc/ssl/certs/" # this machine's authorities count there too
  echo 'set(LLAMA_BUILD_COMMON OFF)' >"$folder/.builder/lean.cmake" # as in the Dockerfile
  mv "$folder/.builder" "$builder"
}

in_builder() {
  chroot "$builder" env -i PATH=/usr/bin:/bin HOME=/root PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$@"
}

image() { # x86_64 amd64 [CMake's arguments]
  settings=$(sed -n '/^ENV CMAKE_ARGS="/,/"$/{s/^ENV CMAKE_ARGS="//;s/["\\]$//;p}' "$project/Dockerfile" | tr '\n' ' ')
  in_builder CMAKE_ARGS="$settings ${*:3}" \
    pip wheel --quiet --no-cache-dir --no-deps --no-binary llama-cpp-python --wheel-dir "/wheels/$1" "$engine"
  # only unpacked: nothing of another architecture runs
  mmdebstrap --quiet --variant=extract --architectures="$2" \
    --include=python3,python3-numpy,python3-psutil,python3-pydantic,python3-yaml,python3-jinja2 \
    --include=python3-diskcache,libgomp1 "$suite" "$folder/.$1"
  python3 -m zipfile -e "$builder/wheels/$1"/*.whl "$folder/.$1/usr/lib/python3/dist-packages"
  mv "$folder/.$1" "$folder/$1"
}

native() { # a name, where the builder is for the command that follows the C++ flags: a file that llama.cpp can load
  if [ ! -d "$builder/source" ]; then
    in_builder pip download --quiet --no-deps --no-binary llama-cpp-python --dest /wheels "$engine"
    mkdir "$builder/source"
    tar -C "$builder/source" --strip-components=1 -xf "$builder"/wheels/*.tar.gz
  fi
  # GGML_BACKEND_DL refuses GGML_NATIVE; this flag is what that stands for
  "${@:4}" cmake -G Ninja -S "$2/source/vendor/llama.cpp" -B "$2/build/$1" -DCMAKE_BUILD_TYPE=Release \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_APP=OFF -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF \
    -DCMAKE_C_FLAGS=-march=native -DCMAKE_CXX_FLAGS="-march=native $3" >/dev/null
  "${@:4}" cmake --build "$2/build/$1" --target ggml-cpu >/dev/null
  cp "$builder/build/$1/bin/libggml-cpu.so" "$folder/compilers/libggml-cpu-$1.so"
}

for part in ${*:-$all}; do
  [ ! -e "$folder/$part" ] && [ ! -e "$folder/compilers/libggml-cpu-$part.so" ] || continue
  echo "$part" >&2
  case $part in
    python3.*) environment "$part" ;;
    builder) make_builder ;;
    x86_64) image x86_64 amd64 ;;
    aarch64)
      image aarch64 arm64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
      ;;
    gcc) native "$part" "$builder" "" env CC=gcc CXX=g++ ;;
    gcc-without-amx) native "$part" "$builder" -U__AMX_INT8__ env CC=gcc CXX=g++ ;;
    gcc-of-the-image) native "$part" "" "" in_builder ;;
    clang) native "$part" "$builder" "" env CC=clang CXX=clang++ ;;
    *) echo "$part is no part; $0 alone lists them" >&2; exit 2 ;;
  esac
done
