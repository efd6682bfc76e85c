#!/usr/bin/env bash
# The install steps of an image without a container engine: the files that the Dockerfile copies, taken by its own COPY
# lines, and docker/install.sh, which it runs, in a fresh folder. Then the installed project is used from elsewhere.
#
#   docker/check_install.sh [cpu|gpu] [FOLDER]     FOLDER is made, and removed again unless it is named
#
# TORCH_INDEX_URL as in the images. Needs Python 3.11 or newer as python3 and a package index.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=${1:-cpu}
dockerfile=$root/docker/$image.Dockerfile
[ -f "$dockerfile" ] || { echo "there is no docker/$image.Dockerfile" >&2; exit 2; }

if [ $# -ge 2 ]; then
    place=$2
    mkdir -p "$place"
else
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
fi
source=$place/source
mkdir -p "$source"

grep '^COPY ' "$dockerfile" | grep -v -- '--from=' | while read -r _ line; do
    set -- $line
    target=$source/${*: -1}
    mkdir -p "$target"
    for item in "${@:1:$#-1}"; do
        # A folder's content is copied, as COPY does; what .dockerignore leaves out of it stays out here as well.
        if [ -d "$root/$item" ]; then
            (cd "$root/$item" && tar -cf - --exclude=__pycache__ --exclude='*.pyc' .) | tar -xf - -C "$target"
        else
            cp "$root/$item" "$target/"
        fi
    done
done

started=$SECONDS
sh "$source/docker/install.sh" "$place/venv" "$source"
echo "installed and checked in $((SECONDS - started)) s"

# From a folder without the sources, as in the container.
cd "$place"
"$place/venv/bin/nightjar" validate "$root/configs/quickstart.yaml"
"$place/venv/bin/python" -c '
import flows.deployments, tasks.launch_plan, training.contract
assert "site-packages" in flows.deployments.__file__, flows.deployments.__file__
print("the installed code is", tasks.launch_plan.ROOT)'
echo "docker/$image.Dockerfile: every install step works"
