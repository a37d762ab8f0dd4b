#!/usr/bin/env bash
# images: which images are used, and their digests. A tag can be moved by whoever owns the repository, a digest cannot.
#   infra/images.sh list              every image that the files name, and whether by digest
#   infra/images.sh pin               asks the registries for the digests of others' images and writes them into the files
#   infra/images.sh own REGISTRY      the same for the images of infra/containers, once they were pushed to REGISTRY: in the manifests
#                                     of infra/kuberay their names become REGISTRY/NAME:TAG@DIGEST
# Needs crane, skopeo or `docker buildx`, with a login to the registries that want one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
files=(containers/*.Dockerfile compose/compose.yaml kuberay/*.yaml)

say() { echo "images: $*" >&2; }
die() { say "$@"; exit 1; }

# Prints the names of all images, each once. Of troupe-* those that compose builds are left out.
images() { sed -nE 's/^FROM ([^ ]+).*/\1/p; s/^ *image: ([^ #]+).*/\1/p' "${files[@]}" | sort -u; }
is_own() { [[ $1 =~ (^|/)troupe-(cpu|gpu|airflow): ]]; }

digest_of() { # IMAGE; of the whole list of platforms, where there is one
  local digest
  if command -v crane >/dev/null; then
    digest=$(crane digest "$1")
  elif command -v skopeo >/dev/null; then
    digest=$(skopeo inspect --no-tags --format '{{.Digest}}' "docker://$1")
  elif docker buildx version >/dev/null 2>&1; then
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1")
  else
    die "none of crane, skopeo and docker buildx is installed: one of them asks the registries for digests"
  fi
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || die "the registry gave no digest of $1: ${digest:-nothing}"
  echo "$digest"
}

replace() { # IMAGE NEW FILE...
  local old=${1//./\\.} new=$2
  shift 2
  sed -E -i "s#^(FROM |.*image: )$old( |\$)#\1$new\2#" "$@"
}

pin() {
  local image digest
  for image in $(images); do
    if is_own "$image" || [[ $image == *@* ]]; then continue; fi
    digest=$(digest_of "$image")
    replace "$image" "$image@$digest" "${files[@]}"
    say "$image@$digest"
  done
}

own() {
  local registry=${1%/} image name digest
  for image in $(images); do
    is_own "$image" || continue
    if ! grep -qE "image: $image( |\$)" kuberay/*.yaml; then continue; fi
    name=${image%@*}
    name=$registry/${name##*/}
    digest=$(digest_of "$name")
    replace "$image" "$name@$digest" kuberay/*.yaml
    say "$name@$digest"
  done
}

list() {
  local image
  for image in $(images); do
    if [[ $image == *@* ]]; then echo "by digest  $image"
    elif is_own "$image"; then echo "own        $image"
    else echo "by tag     $image"; fi
  done
}

case ${1:-} in
  list) list ;;
  pin) pin ;;
  own) own "${2:?usage: infra/images.sh own REGISTRY}" ;;
  *) echo "usage: infra/images.sh list|pin|own REGISTRY" >&2; exit 2 ;;
esac
