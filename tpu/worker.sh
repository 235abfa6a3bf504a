#!/usr/bin/env bash
# What `python -m tpu launch` runs on each host of a slice. Everything is in ~/run:
#   code/      the source            command   arguments of the run        pid, python.pid   while it runs
#   venv/      Python and packages   log.txt   what it printed             exit              its exit status
#   stopped    it was asked to stop
#
#   worker.sh setup             install Python, JAX for TPU and the requirements
#   worker.sh start ARGUMENT... python -m pretrain run ARGUMENT..., detached; nothing if just that runs already
#   worker.sh follow LINES      the log after so many lines, until the run ends
#   worker.sh lines             how many lines the log has
#   worker.sh report            one line: running | ended STATUS | stopped STATUS | lost (no status left) | idle
#   worker.sh stop SECONDS      SIGTERM: the run writes a checkpoint; wait for its end
#   worker.sh kill SECONDS      the same, then SIGKILL
set -euo pipefail

readonly RUN="$HOME/run"

setup() {
  cd "$RUN/code"
  # The images are Ubuntu 22.04, whose Python is 3.10; the code needs 3.11. uv brings one without root and without
  # apt, which the automatic upgrades lock in a new VM's first minutes.
  local python
  if python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
    python=python3
  else
    export PATH="$HOME/.local/bin:$PATH"
    command -v uv > /dev/null || curl -LsSf --retry 5 https://astral.sh/uv/install.sh | sh > /dev/null
    uv python install --quiet 3.12
    python=$(uv python find 3.12)
  fi
  command -v make > /dev/null || sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y make
  make --silent setup ACCELERATOR=tpu PYTHON="$python" VENV="$RUN/venv"
}

running() {  # a pid alone may have gone to another process since the VM was restarted
  [ -e "$RUN/pid" ] && tr '\0' ' ' 2> /dev/null < "/proc/$(cat "$RUN/pid")/cmdline" | grep -q 'worker.sh keep'
}

start() {
  if running; then
    [ "$(cat "$RUN/command")" = "$*" ] && return
    echo "another run is going on here: python -m pretrain run $(cat "$RUN/command")" >&2
    exit 3
  fi
  rm -f "$RUN"/{pid,python.pid,exit,stopped}
  [ ! -e "$RUN/log.txt" ] || mv "$RUN/log.txt" "$RUN/previous-log.txt"
  echo "$*" > "$RUN/command"
  # setsid and closed streams: the run outlives this ssh session, and ssh does not wait for it
  setsid bash "$RUN/code/tpu/worker.sh" keep "$@" >> "$RUN/log.txt" 2>&1 < /dev/null &
  until [ -e "$RUN/python.pid" ]; do sleep 0.1; done
}

keep() {  # stays with the run and writes down how it ended
  echo $$ > "$RUN/pid"
  cd "$RUN/code"
  PYTHONUNBUFFERED=1 "$RUN/venv/bin/python" -m pretrain run "$@" &
  echo $! > "$RUN/python.pid"
  local status=0
  wait $! || status=$?
  echo "$status" > "$RUN/exit.part"
  mv "$RUN/exit.part" "$RUN/exit"
}

follow() {
  [ -e "$RUN/log.txt" ] && tail -n "+$(($1 + 1))" --pid="$(cat "$RUN/pid")" -f "$RUN/log.txt"
}

lines() {
  wc -l < "$RUN/log.txt"
}

report() {
  local state=idle
  if running; then
    state=running
  elif [ -e "$RUN/exit" ]; then
    state="$([ -e "$RUN/stopped" ] && echo stopped || echo ended) $(cat "$RUN/exit")"
  elif [ -e "$RUN/pid" ]; then
    state=lost
  fi
  echo "$(hostname): $state"
}

stop() {
  if running; then
    touch "$RUN/stopped"
    kill -TERM "$(cat "$RUN/python.pid")" 2> /dev/null || true
    local end=$((SECONDS + $1))
    while running && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
  fi
  report
}

kill_after() {
  stop "$1" > /dev/null
  if running; then
    kill -KILL "$(cat "$RUN/python.pid")" 2> /dev/null || true
    while running; do sleep 0.1; done
  fi
  report
}

case "${1:-}" in
  setup | start | keep | follow | lines | report | stop) "$@" ;;
  kill) kill_after "$2" ;;
  *) echo "worker.sh: unknown command ${1:-}" >&2; exit 2 ;;
esac
