#!/bin/sh
# The install steps of both images; check_image.py runs them without a container engine.
#
#   install.sh VENV SOURCE     SOURCE: a folder with requirements.lock, docker/servers.lock and the project
#
# TORCH_INDEX_URL: index of the PyTorch build to take; empty: the default one, which brings CUDA on Linux.
set -eu

venv=$1
source=$2
torch_index=${TORCH_INDEX_URL:-}

python3 -m venv "$venv"
pip="$venv/bin/python -m pip --no-input --disable-pip-version-check"
if [ -n "$torch_index" ]; then
    # First and alone, so that nothing else can come from there; the lock's exact version is then satisfied, and what it
    # needs comes with the lock.
    $pip install --no-cache-dir --quiet --no-deps --index-url "$torch_index" "$(grep '^torch==' "$source/requirements.lock")"
fi
$pip install --no-cache-dir --quiet -r "$source/requirements.lock" -r "$source/docker/servers.lock"
$pip install --no-cache-dir --quiet --no-deps --no-build-isolation "$source"
$pip check
# A first use, so that an image that cannot start is never built.
"$venv/bin/nightjar" --help > /dev/null
"$venv/bin/prefect" version > /dev/null
"$venv/bin/mlflow" --version > /dev/null
"$venv/bin/python" -c 'import psycopg2, asyncpg, boto3, torch, transformers'
