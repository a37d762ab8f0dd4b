#!/usr/bin/env bash
# ray_head: starts a Ray head on the loopback interface, which outlives commands. `infra/ray_head.sh up|down`.
#
# Its process id is stored under .cache/ray (TROUPE_CACHE names another folder). `down` ends that process and its children,
# never another Ray.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ray=${RAY:-.venv/bin/ray}
port=${TROUPE_RAY_PORT:-6399}
dashboard_port=${TROUPE_RAY_DASHBOARD_PORT:-8299}
state=${TROUPE_CACHE:-.cache}/ray

# With Ray's default niceness of 15, replicas that serve production traffic would get almost no CPU beside other processes,
# and hardly more than shadow replicas.
export RAY_worker_niceness=${RAY_worker_niceness:-0}

# Processes that Ray starts find `troupe` and `python` of this environment, also where it is not activated.
PATH=$(cd "$(dirname "$(command -v "$ray")")" && pwd):$PATH

# All of it talks over the loopback interface, also where HTTP_PROXY is set for every process.
NO_PROXY=${NO_PROXY:-${no_proxy:-}}
export NO_PROXY=${NO_PROXY:+$NO_PROXY,}127.0.0.1,localhost,::1
export no_proxy=$NO_PROXY

# A process is identified by its id and its start time, because ids are reused.
started_at() { cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null || true; }

is_up() {
  [ -f $state/head ] || return 1
  read -r pid since _ <$state/head
  [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ]
}

boot() { cat /proc/sys/kernel/random/boot_id; }

# Ends what is left of a head whose first process is gone: a raylet outlives its GCS, and holds the ports. Since the machine
# was booted no other process can have had this id as long as the process group of that id lives.
end_remains() {
  [ -f $state/head ] || return 0
  read -r pid _ booted <$state/head
  if [ "$booted" = "$(boot)" ] && [ ! -e "/proc/$pid" ] && kill -KILL -- "-$pid" 2>/dev/null; then
    echo "ended what was left of the Ray head (process $pid)"
  fi
}

is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

usage() {
  echo "Ray head at 127.0.0.1:$(cat $state/port) (process $pid, log $state/head.log). Use it with"
  echo "  export RAY_ADDRESS=127.0.0.1:$(cat $state/port)    or    troupe train RUN.yaml --address 127.0.0.1:$(cat $state/port)"
  echo "and for jobs  export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$(cat $state/dashboard_port)"
  echo "Stop it with: make down"
}

# Starts the head; returns 0 once it runs.
launch() {
  # Port 0: the agent takes a free port. Its default is fixed, and a second head on this machine would then accept no jobs.
  # Locks and pipes of the caller stay with the caller: a head that held them would hold them for days.
  (
    for descriptor in /proc/self/fd/*; do
      if [ "${descriptor##*/}" -gt 2 ]; then eval "exec ${descriptor##*/}>&-"; fi
    done
    exec setsid nohup "$ray" start --head --block --node-ip-address 127.0.0.1 --port "$port" --include-dashboard true \
      --dashboard-host 127.0.0.1 --dashboard-port "$dashboard_port" --dashboard-agent-listen-port 0 \
      --disable-usage-stats >$state/head.log 2>&1 </dev/null
  ) &
  pid=$!
  echo "$pid $(started_at "$pid") $(boot)" >$state/head
  for _ in $(seq 240); do
    if grep -q "Ray runtime started" $state/head.log; then return 0; fi
    if ! is_up; then return 1; fi
    sleep 0.5
  done
  return 1
}

up() {
  if is_up; then usage; return; fi
  end_remains
  for number in "$port" "$dashboard_port"; do
    if is_taken "$number"; then
      echo "ray_head: port $number is taken: choose others with TROUPE_RAY_PORT and TROUPE_RAY_DASHBOARD_PORT" >&2
      exit 2
    fi
  done
  mkdir -p $state
  # Without the token other users of this machine cannot connect: Ray writes it, and would let them read it.
  (umask 077 && "$ray" get-auth-token --generate >/dev/null)
  if [ -O ~/.ray/auth_token ]; then chmod 600 ~/.ray/auth_token; fi # of an earlier Ray
  echo "$port" >$state/port
  echo "$dashboard_port" >$state/dashboard_port
  for _ in 1 2; do # Ray gives up its start where the machine stalls for 30 s
    if launch; then usage; return; fi
    grep -q "timed out during startup" $state/head.log || break
    kill -KILL -- "-$pid" 2>/dev/null || true # its children hold the port
  done
  echo "ray_head: Ray did not start within 120 s: mostly other programs keep this machine busy, or its memory is full. End some, then repeat." >&2
  echo "ray_head: its last line: $(tail -n 1 $state/head.log); all of them: $state/head.log" >&2
  if is_up; then down; fi
  exit 1
}

down() {
  if ! is_up; then
    echo "no Ray head of \`make up\` is running"
    end_remains
    rm -f $state/head
    return
  fi
  kill -TERM "$pid"
  for _ in $(seq 60); do
    is_up || break
    sleep 0.5
  done
  for _ in $(seq 20); do # the rest of the process group that setsid made: the dashboard holds its port a moment longer
    kill -0 -- "-$pid" 2>/dev/null || break
    sleep 0.5
  done
  if kill -0 -- "-$pid" 2>/dev/null; then kill -KILL -- "-$pid"; fi
  rm -f $state/head
  echo "Ray head (process $pid) stopped"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) echo "usage: infra/ray_head.sh up|down" >&2; exit 2 ;;
esac
