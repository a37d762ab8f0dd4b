#!/usr/bin/env bash
# ray_head: a Ray head on the loopback interface that outlives commands. `infra/ray_head.sh up|down`.
#
# Its process id is kept under .cache/ray (TROUPE_CACHE: elsewhere); `down` ends that process and what it started, never another Ray.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ray=${RAY:-.venv/bin/ray}
port=${TROUPE_RAY_PORT:-6399}
dashboard_port=${TROUPE_RAY_DASHBOARD_PORT:-8299}
state=${TROUPE_CACHE:-.cache}/ray

# Ray's own 15 would leave those who answer people next to nothing beside anything else, and hardly more than a shadow.
export RAY_worker_niceness=${RAY_worker_niceness:-0}

# What Ray starts finds `troupe` and `python` of this environment, also where nobody has activated it.
PATH=$(cd "$(dirname "$(command -v "$ray")")" && pwd):$PATH

# Two facts name a process for good: its id and when it started (ids are used again).
started_at() { cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null || true; }

is_up() {
  [ -f $state/head ] || return 1
  read -r pid since <$state/head
  [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ]
}

is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

usage() {
  echo "Ray head at 127.0.0.1:$(cat $state/port) (process $pid, log $state/head.log). Use it with"
  echo "  export RAY_ADDRESS=127.0.0.1:$(cat $state/port)    or    troupe train RUN.yaml --address 127.0.0.1:$(cat $state/port)"
  echo "and for jobs  export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$(cat $state/dashboard_port)"
  echo "Stop it with: make down"
}

# Starts the head; true once it runs.
launch() {
  # The agent takes a free port: its default is one, and a second head on this machine would take no jobs.
  setsid nohup "$ray" start --head --block --node-ip-address 127.0.0.1 --port "$port" --include-dashboard true \
    --dashboard-host 127.0.0.1 --dashboard-port "$dashboard_port" --dashboard-agent-listen-port 0 --disable-usage-stats \
    >$state/head.log 2>&1 </dev/null &
  pid=$!
  echo "$pid $(started_at "$pid")" >$state/head
  for _ in $(seq 240); do
    if grep -q "Ray runtime started" $state/head.log; then return 0; fi
    if ! is_up; then return 1; fi
    sleep 0.5
  done
  return 1
}

up() {
  if is_up; then usage; return; fi
  for wanted in "$port" "$dashboard_port"; do
    if is_taken "$wanted"; then
      echo "ray_head: port $wanted is taken: choose others with TROUPE_RAY_PORT and TROUPE_RAY_DASHBOARD_PORT" >&2
      exit 2
    fi
  done
  mkdir -p $state
  "$ray" get-auth-token --generate >/dev/null # other users of this machine cannot connect without it
  echo "$port" >$state/port
  echo "$dashboard_port" >$state/dashboard_port
  for _ in 1 2; do # on a machine that stands still for 30 s Ray gives up its own start
    if launch; then usage; return; fi
    grep -q "timed out during startup" $state/head.log || break
    kill -KILL -- "-$pid" 2>/dev/null || true # what it had started holds the port
  done
  tail -n 20 $state/head.log >&2
  echo "ray_head: Ray did not start within 120 s, its last lines are above" >&2
  if is_up; then down; fi
  exit 1
}

down() {
  if ! is_up; then
    echo "no Ray head of \`make up\` is running"
    rm -f $state/head
    return
  fi
  kill -TERM "$pid"
  for _ in $(seq 60); do
    is_up || break
    sleep 0.5
  done
  if is_up; then kill -KILL -- "-$pid"; fi # its own process group: setsid made one
  rm -f $state/head
  echo "Ray head (process $pid) stopped"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) echo "usage: infra/ray_head.sh up|down" >&2; exit 2 ;;
esac
