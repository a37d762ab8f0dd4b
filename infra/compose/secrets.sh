#!/usr/bin/env bash
# secrets: writes new random secrets to a file that only its owner reads, infra/compose/.env or the path given. Git ignores the first.
set -euo pipefail
file=${1:-$(dirname "$0")/.env}
umask 077
random() { head -c "$1" /dev/urandom | base64 -w0 | tr '+/' '-_'; }
if [ -e "$file" ]; then
  echo "$file is there: services may run with its secrets. Remove it to make new ones." >&2
  exit 1
fi
cat >"$file" <<END
POSTGRES_PASSWORD=$(random 24)
PGPASSWORD=$(random 24)
MLFLOW_PGPASSWORD=$(random 24)
AIRFLOW_PGPASSWORD=$(random 24)
MLFLOW_PASSWORD=$(random 24)
MLFLOW_SECRET_KEY=$(random 32)
AWS_SECRET_ACCESS_KEY=$(random 24)
RAY_AUTH_TOKEN=$(random 32)
AIRFLOW_JWT_SECRET=$(random 64)
AIRFLOW_FERNET_KEY=$(random 32)
END
echo "$file"
