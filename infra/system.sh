#!/usr/bin/env bash
# system: installs the missing packages of infra/system-packages.txt with apt as root; otherwise prints their names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
missing=()
while read -r package program purpose; do
  case $package in '' | '#'*) continue ;; esac
  if command -v "$program" >/dev/null; then
    echo "present  $package: $purpose"
  else
    echo "missing  $package: $purpose"
    missing+=("$package")
  fi
done <system-packages.txt
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
else
  echo "not root, or no apt: ask for these packages: ${missing[*]}" >&2
  exit 1
fi
