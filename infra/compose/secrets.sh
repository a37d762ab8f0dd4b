#!/usr/bin/env bash
# secrets: prints new random secrets as an env file. `infra/compose/secrets.sh >infra/compose/.env`; git ignores that file.
set -euo pipefail
umask 077
random() { head -c "$1" /dev/urandom | base64 -w0 | tr '+/' '-_'; }
echo "PGPASSWORD=$(random 24)"
echo "AWS_SECRET_ACCESS_KEY=$(random 24)"
echo "RAY_AUTH_TOKEN=$(random 32)"
echo "AIRFLOW_JWT_SECRET=$(random 64)"
echo "AIRFLOW_FERNET_KEY=$(random 32)"
