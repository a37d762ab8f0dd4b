#!/usr/bin/env bash
# databases: one database for each service, and a user that owns it and may use no other. The image runs it on an empty disk.
set -euo pipefail
make() { # NAME PASSWORD
  owner=$1 password=$2 psql --username "$POSTGRES_USER" --dbname postgres --quiet --no-psqlrc -v ON_ERROR_STOP=1 <<'END'
\getenv owner owner
\getenv password password
CREATE ROLE :"owner" LOGIN PASSWORD :'password';
CREATE DATABASE :"owner" OWNER :"owner";
REVOKE CONNECT ON DATABASE :"owner" FROM PUBLIC;
END
}
make troupe "$TROUPE_PGPASSWORD" # the journal
make mlflow "$MLFLOW_PGPASSWORD"
make airflow "$AIRFLOW_PGPASSWORD"
