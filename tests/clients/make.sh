#!/usr/bin/env bash
# make: the environments in which agent frameworks are played, in .cache/clients: they pin other versions than Troupe, and than one another.
#
#   tests/clients/make.sh NAME ...   venvs by locks/NAME.txt, and `node` by node/package-lock.json; made anew only where a lock has changed
#   tests/clients/make.sh lock       resolves locks/*.in and node/package.json anew
#
# uv is that of infra/setup.sh, or on the PATH; pip's and npm's settings (index, mirror, certificates) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=tests/clients cache=.cache/clients
[ $# -gt 0 ] || { echo "usage: $here/make.sh NAME ... | lock" >&2; exit 2; }
uv=.tools/bin/uv
[ -x $uv ] || uv=uv
python=.venv/bin/python
flags=()
eval "$($python infra/pip_settings.py)"

venv() {
  local folder=$cache/$1 list=$here/locks/$1.txt
  cmp -s "$list" "$folder/made-from.txt" && return
  rm -rf "$folder"
  "$uv" venv --quiet --python $python "$folder"
  "$uv" pip install --quiet --no-deps --python "$folder" "${flags[@]}" -r "$list"
  cp "$list" "$folder/made-from.txt"
}

node() {
  local folder=$cache/node list=$here/node/package-lock.json
  mkdir -p "$folder"
  cp $here/node/play.mjs "$folder"
  cmp -s "$list" "$folder/made-from.json" && return
  rm -f "$folder/made-from.json"
  cp "$list" $here/node/package.json "$folder"
  npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error
  cp "$list" "$folder/made-from.json"
}

lock() {
  local list
  for list in "$here"/locks/*.in; do
    "$uv" pip compile "$list" --universal --python-version 3.11 --no-header --no-annotate --quiet "${flags[@]}" -o "${list%.in}.txt" --upgrade
  done
  # Without the address of the registry that answered: npm's settings name the one to ask.
  npm install --prefix $here/node --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund
}

mkdir -p $cache
exec 9>$cache/lock
flock 9 # two at once would write into the same folders
for name in "$@"; do
  case $name in
    node | lock) "$name" ;;
    *) venv "$name" ;;
  esac
done
