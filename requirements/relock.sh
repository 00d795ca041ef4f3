#!/usr/bin/env bash
# Resolves the requirements anew, in an environment of its own, and writes requirements/lock.txt:
#
#     requirements/relock.sh VENV [PYTHON]
#     requirements/relock.sh --docs VENV [PYTHON]    (requirements/docs.lock.txt)
#
# VENV is an empty folder (about 3.3 GB to download, 20 MB with --docs), PYTHON a Python 3.12, python3.12 if not named.
#
# Run the tests with `make test VENV=…`, or `make docs`, before committing the result.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
docs=
if [[ ${1:-} == --docs ]]; then
  docs=yes
  shift
fi
venv=${1:?"name an empty folder for the environment, e.g. requirements/relock.sh /tmp/relock"}
if [[ -e $venv && -n $(ls -A "$venv") ]]; then
  printf 'relock: error: %s is not empty; leftovers would end up in the lock file\n' "$venv" >&2
  exit 1
fi

"${2:-python3.12}" -m venv "$venv"
if [[ -n $docs ]]; then
  "$venv/bin/python" -m pip install -r "$here/docs.in"
  "$venv/bin/python" -m pip freeze --all --exclude pip >"$here/docs.lock.txt"
  exit
fi
"$venv/bin/python" -m pip install -r "$here/direct.in" -r "$here/unresolvable-runtime.in"
"$venv/bin/python" -m pip install --no-deps -r "$here/unresolvable.in"
"$venv/bin/python" -m pip freeze --all --exclude pip >"$here/lock.txt"
