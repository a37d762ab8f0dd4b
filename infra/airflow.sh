#!/usr/bin/env bash
# airflow: starts a local Airflow (standalone, SQLite) with the DAGs, a Ray head and MLflow's server, all on the loopback
# interface. `infra/airflow.sh up|down`.
#
# State and process ids are stored in .cache/airflow (TROUPE_CACHE names another folder). `down` ends those processes and
# their children, no other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${BIN:-.venv/bin}
port=${TROUPE_AIRFLOW_PORT:-8080}
mlflow_port=${TROUPE_MLFLOW_PORT:-5000}
folder=${PWD//%/%25} # in a URL, a ? in the path would begin options
mlflow_db=${TROUPE_MLFLOW_URI:-sqlite:///${folder//\?/%3F}/runs/mlflow.db}
ray_state=${TROUPE_CACHE:-.cache}/ray
mkdir -p "${TROUPE_CACHE:-.cache}/airflow"
state=$(cd "${TROUPE_CACHE:-.cache}/airflow" && pwd)

# All of it talks over the loopback interface, also where HTTP_PROXY is set for every process.
NO_PROXY=${NO_PROXY:-${no_proxy:-}}
export NO_PROXY=${NO_PROXY:+$NO_PROXY,}127.0.0.1,localhost,::1
export no_proxy=$NO_PROXY

# A process is identified by its id and its start time, because ids are reused.
started_at() { cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null || true; }

is_up() { # NAME; sets pid
  [ -f "$state/$1.pid" ] || return 1
  read -r pid since <"$state/$1.pid"
  [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ]
}

is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

start() { # NAME COMMAND...
  local name=$1
  shift
  setsid nohup "$@" >"$state/$name.log" 2>&1 </dev/null &
  echo "$! $(started_at "$!")" >"$state/$name.pid"
}

send_term() { # NAME; sends TERM to its process group
  if is_up "$1"; then kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid"; fi
}

stop() { # NAME; sends KILL to what is left of it 10 s after TERM
  if ! is_up "$1"; then
    rm -f "$state/$1.pid"
    return
  fi
  for _ in $(seq 20); do
    is_up "$1" || break
    sleep 0.5
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
  rm -f "$state/$1.pid"
  echo "$1 (process $pid) stopped"
}

answers() { # URL
  "$bin/python" -c 'import sys, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=5)' \
    "$1" 2>/dev/null
}

wait_for() { # NAME URL SECONDS
  for _ in $(seq "$3"); do
    if answers "$2"; then return; fi
    if ! is_up "$1"; then break; fi
    sleep 1
  done
  echo "airflow: $1 did not answer at $2 within $3 s: mostly other programs keep this machine busy, or its memory is full. End some, then repeat." >&2
  echo "airflow: its last line: $(tail -n 1 "$state/$1.log"); all of them: $state/$1.log" >&2
  down >&2
  [ -n "$had_head" ] || infra/ray_head.sh down >&2
  exit 1
}

addresses() {
  echo "Airflow  http://127.0.0.1:$(cat "$state/port")   (log $state/airflow.log)"
  echo "Ray      http://127.0.0.1:$(cat $ray_state/dashboard_port)"
  echo "MLflow   http://127.0.0.1:$(cat "$state/mlflow_port")"
  echo "DAGs come from the run configs with a \`schedule\`: ${TROUPE_RUN_CONFIGS:-infra/runs/*.yaml}. Stop all with: make down"
}

up() {
  if is_up airflow && is_up mlflow && infra/ray_head.sh up >/dev/null; then addresses; return; fi
  down # ends what is left where one of the processes has died
  for number in "$port" "$mlflow_port"; do
    if is_taken "$number"; then
      echo "airflow: port $number is taken: choose others with TROUPE_AIRFLOW_PORT and TROUPE_MLFLOW_PORT" >&2
      exit 2
    fi
  done
  mkdir -p "$state/config" runs
  echo "import dags.local_airflow  # noqa: F401 - imported once, not by every task" >"$state/config/airflow_local_settings.py"
  had_head=$(cat "$ray_state/head" 2>/dev/null || true)
  infra/ray_head.sh up >/dev/null
  echo "$port" >"$state/port"
  echo "$mlflow_port" >"$state/mlflow_port"
  [ -f "$state/secret" ] || (umask 077 && head -c 48 /dev/urandom | base64 -w0 >"$state/secret")
  PATH=$(cd "$bin" && pwd):$PATH # Airflow's commands start each other by name
  export PATH
  export TROUPE_MLFLOW_URL=${TROUPE_MLFLOW_URL:-http://127.0.0.1:$mlflow_port} # the links in an iteration's record point there
  export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$(cat $ray_state/dashboard_port)
  unset RAY_ADDRESS
  export AIRFLOW_HOME=$state
  export AIRFLOW__CORE__DAGS_FOLDER=$PWD/dags
  export AIRFLOW__CORE__LOAD_EXAMPLES=False
  export AIRFLOW__CORE__PARALLELISM=${AIRFLOW__CORE__PARALLELISM:-8}
  export AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION=${AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION:-False}
  export AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS=True # no login: hence the loopback interface
  export AIRFLOW__API__HOST=127.0.0.1 AIRFLOW__API__PORT=$port AIRFLOW__API__BASE_URL=http://127.0.0.1:$port
  export AIRFLOW__API__WORKERS=1
  export AIRFLOW__API_AUTH__JWT_SECRET
  AIRFLOW__API_AUTH__JWT_SECRET=$(cat "$state/secret")
  export AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL=10
  export AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME=${AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME:-0.2} # Airflow's default of 1 adds up to 3 s per task
  case ${AIRFLOW__DATABASE__SQL_ALCHEMY_CONN:-sqlite} in sqlite*)
    export AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS=dags.local_airflow.SQLITE
    export AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS_ASYNC=dags.local_airflow.SQLITE ;;
  esac
  export AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL=1 # a short task ends only with its next heartbeat, see dags/ray_job.py
  export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false} # its jobs, which Troupe does not use, are seven more processes
  export AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT=${AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT:-120} # a killed task is noticed after two minutes, not five; a writer of SQLite may wait one
  start airflow airflow standalone
  start mlflow mlflow server --backend-store-uri "$mlflow_db" --host 127.0.0.1 --port "$mlflow_port" --workers 1
  wait_for airflow "http://127.0.0.1:$port/api/v2/monitor/health" 600
  wait_for mlflow "http://127.0.0.1:$mlflow_port/health" 180
  addresses
}

down() {
  send_term airflow
  send_term mlflow
  stop airflow
  stop mlflow
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) echo "usage: infra/airflow.sh up|down" >&2; exit 2 ;;
esac
