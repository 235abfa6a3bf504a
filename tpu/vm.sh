#!/usr/bin/env bash
# The program of each host of a slice, run as root. Google Cloud runs this file as startup script at each boot: `boot`
# hands over to systemd, which runs `work` again and again until it ends with 0.
#
# $STATE in the bucket holds code.tar.gz and settings.sh, which the launcher wrote; `stop`, if a stop was requested; and
# for each host log/HOST/TIME.txt, the output of one start, and ended/HOST, its last exit status and the reason. No two
# starts write the same file, and a log only grows, so no line can be lost or repeated.
set -u
export PATH="$PATH:/snap/bin" PYTHONUNBUFFERED=1
readonly ROOT="${ROOT:-}"
export HOME="$ROOT/root"
readonly HERE="$ROOT/var/lib/pretrain"
readonly MEMORY="$ROOT/run/pretrain"  # all that reporting and deleting need: a failed disk must not keep a slice alive
export CLOUDSDK_CONFIG="$MEMORY/gcloud" CLOUDSDK_CORE_DISABLE_FILE_LOGGING=1
readonly POLL=20 STARTS=6  # seconds between polls; give up after this many starts in a row without a new checkpoint
readonly HANGING=7200  # kill the run if the first host, which prints its lines, prints nothing for this many seconds
readonly REFUSAL='HTTPError 40[13]|does not have |denied on |insufficient authentication'  # to read or to write
readonly ATTRIBUTES="http://metadata.google.internal/computeMetadata/v1/instance/attributes"

boot() {
  mkdir -p "$HERE/log" "$MEMORY/new"
  cp "$0" "$MEMORY/vm.sh"
  until metadata pretrain-settings > "$MEMORY/settings.sh"; do sleep 10; done  # no host could delete without them
  systemd-run --no-block --unit=pretrain --property=StartLimitIntervalSec=0 --property=Restart=on-failure \
    --property=RestartSec=10 --property=KillMode=mixed --property=OOMPolicy=continue --property=TimeoutStopSec=120 \
    /bin/bash "$MEMORY/vm.sh" work
}

work() {
  . "$MEMORY/settings.sh"
  HOST="$(environment NODE_ID)-w-$(environment WORKER_ID)"
  LOG="$HERE/log/$(date -u +%Y%m%d-%H%M%S-%N).txt" shared=0 child= asked= shutdown= hung=
  exec 3>&2  # messages of this script's own gcloud go to the journal, not into the run's log
  trap 'shutdown=1; [ -z "$child" ] || kill -TERM "$child"' TERM
  local vain; vain=$(cat "$HERE/vain" 2> /dev/null || echo 0)
  local known; known=$(cat "$HERE/saved" 2> /dev/null)
  local saved; saved=$(gcloud storage ls "${RUN[4]%/}/checkpoints/" 2>&3 | grep -E '/[0-9]+/$') || saved=$known
  [ "$saved" = "$known" ] || vain=0
  exec >> "$LOG" 2>&1 && echo "$saved" > "$HERE/saved" && echo $((vain + 1)) > "$HERE/vain" \
    || finish 134 "error: $HOST cannot write to its disk"
  [ "$vain" -lt "$STARTS" ] || finish 134 "error: $HOST gave up after $vain starts without a new checkpoint"
  [ "$vain" -eq 0 ] || pause $((20 * 2 ** vain))
  [ -z "$shutdown" ] || exit 75
  # Retried for minutes even if it is refused: a new permission takes effect some minutes later.
  if ! persistently gcloud storage cp "$STATE/settings.sh" "$STATE/code.tar.gz" "$MEMORY/new/" 2> "$MEMORY/said"; then
    cat "$MEMORY/said" >&3
    grep -qE "$REFUSAL" "$MEMORY/said" || exit 134
    finish 1 "error: $HOST cannot read $STATE: its service account needs roles/storage.objectUser on the bucket"
  fi
  # Other settings in the bucket: another slice has this name and folder now; leave without reporting to it.
  [ "$(head -n 1 "$MEMORY/new/settings.sh")" = "$(head -n 1 "$MEMORY/settings.sh")" ] || leave
  mv "$MEMORY/new/settings.sh" "$MEMORY/"
  . "$MEMORY/settings.sh"
  [ -e "$HERE/venv" ] || { echo "installing Python and JAX: some minutes"; check_rights; }
  local printed quiet=0
  run & child=$!
  while kill -0 "$child" 2> /dev/null; do
    pause $((shutdown ? 1 : POLL))  # a preempted slice has half a minute for its last lines
    share
    [ "$HOST" != "$FIRST" ] || printed=$(stat -c %Y "$LOG") quiet=$((EPOCHSECONDS - printed))
    [ "$quiet" -lt "$HANGING" ] || { kill -KILL "$child"; hung=134; break; }  # no wait: stuck in a driver, it may not die
    if [ -z "$asked" ] && listed | grep -q "/stop$"; then asked=1; kill -TERM "$child"; fi
  done
  [ -z "$hung" ] || echo "error: $HOST printed nothing for $HANGING seconds and was killed"
  [ -n "$hung" ] || wait "$child"
  local status=${hung:-$?}
  [ -z "$(tail -c 1 "$LOG")" ] || echo >> "$LOG"
  persistently share
  # 75: stopped on request. 134: JAX aborts if another host is gone. Both start again, unless the run is to end.
  case "$status" in 75 | 134 | 143)
    local names; names=$(persistently listed)
    ! grep -q "/stop$" <<< "$names" || finish 75 "stopped"
    [ -z "$shutdown" ] && grep -q "/launch/ended/" <<< "$names" || exit "$status"
  esac
  local why; why=$(grep -aE '^(error:|[A-Za-z_.]+(Error|Exception|Interrupt)\b)' "$LOG" | tail -n 1)
  finish "$status" "${why:-$(tail -n 1 "$LOG")}"
}

run() {  # in the background: this subshell becomes Python
  rm -rf "$HERE/code" && mkdir "$HERE/code" && tar -xzf "$MEMORY/new/code.tar.gz" -C "$HERE/code" && cd "$HERE/code" || exit 1
  persistently setup || { echo "error: the set-up failed"; exit 1; }
  exec "$HERE/venv/bin/python" -m pretrain run "${RUN[@]}"
}

setup() {
  # The images have different Pythons, and the code needs 3.11. uv installs one without apt, which automatic upgrades
  # lock in a new VM's first minutes.
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv > /dev/null || curl -LsSf --retry 5 https://astral.sh/uv/install.sh | sh > /dev/null || return
  uv python install --quiet 3.12 || return
  command -v make > /dev/null || apt-get -qq -o DPkg::Lock::Timeout=600 install -y make || return
  make --silent setup ACCELERATOR=tpu PYTHON="$(uv python find 3.12)" VENV="$HERE/venv"
}

finish() {  # STATUS WHY: this host has ended for good
  tr '\r' ' ' <<< "$1 $2" > "$MEMORY/ended"  # keeps a progress line on one line
  persistently share
  persistently gcloud storage cp "$MEMORY/ended" "$STATE/ended/$HOST" 2>&3
  if [ ${#DELETE[@]} -eq 0 ]; then  # the slice stays: wait until a launcher starts another run
    local names
    while ! names=$(listed) || grep -q "/ended/$HOST$" <<< "$names"; do pause 60; done
    rm "$HERE/vain"
    exit 75
  fi
  for _ in {1..9}; do  # three minutes for the other hosts' reports
    [ "$(listed | grep -c "/launch/ended/")" -lt "$HOSTS" ] || break
    pause "$POLL"
  done
  leave
}

leave() {  # delete the slice, if that is requested, and end
  until "${DELETE[@]}" 2>&3; do pause 300; done
  exit 0
}

check_rights() {  # tested early, while someone reads the log, by deleting a slice that does not exist
  [ ${#DELETE[@]} -gt 0 ] || return 0
  local said; said=$("${DELETE[@]:0:5}" no-such-slice "${DELETE[@]:6}" 2>&1)  # the sixth word is its name
  [[ $said == *NOT_FOUND* ]] || cat << END
warning: this slice may not delete itself, for which its service account needs roles/tpu.admin (${said##*$'\n'})
warning: when the run has ended, it costs until a python -m tpu launch that watches deletes it, or python -m tpu delete
END
}

share() {  # upload the log if it has grown; a copy, because it may grow meanwhile
  local size; size=$(stat -c %s "$LOG") || return 0
  [ "$size" -ne "$shared" ] || return 0
  cp "$LOG" "$HERE/part" && gcloud storage cp "$HERE/part" "$STATE/log/$HOST/${LOG##*/}" 2>&3 && shared=$size
}

listed() {  # the filter excludes removed objects, which a bucket with versioning also lists
  gcloud storage objects list "$STATE/**" --filter="-noncurrent_time>1970" --format="value(name)" 2>&3
}

metadata() { curl -sf --retry 20 --retry-connrefused -H "Metadata-Flavor: Google" "$ATTRIBUTES/$1"; }

environment() { metadata tpu-env | sed -n "s/^$1: '\(.*\)'$/\1/p"; }

pause() { sleep "$1" & wait $!; }  # a sleep that a signal ends

gcloud() {  # with a time limit, so that it cannot hang
  type -P gcloud > /dev/null || timeout 600 snap install google-cloud-cli --classic >&2
  timeout -k 10 600 gcloud "$@"
}

persistently() {
  local delay
  for delay in 5 10 20 40 80 160; do
    "$@" && return
    pause "$delay"
  done
  "$@"
}

"${1:-boot}"
