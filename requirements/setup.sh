#!/usr/bin/env bash
# Makes the virtual environment in which rlrefit's demo and tests run, the one that builds the site, or one in which SGLang's
# own code, another release of vLLM or TRL is tested:
#
#     requirements/setup.sh [VENV]            (VENV: where it goes, default .venv of this checkout)
#     requirements/setup.sh --docs [VENV]     (default .venv-docs; without rlrefit)
#     requirements/setup.sh --sglang [VENV]   (default .venv-sglang; over .venv, whose packages and rlrefit it finds)
#     requirements/setup.sh --sglang 0.5.23 [VENV]   (the same with a newer release; default .venv-sglang-0.5.23)
#     requirements/setup.sh --vllm SERIES [VENV]   (0.26 or 0.32; default .venv-vllm-SERIES; over .venv too)
#     requirements/setup.sh --trl [VENV]      (default .venv-trl; over .venv too)
#
# Every step is safe to repeat. A finished environment carries a stamp and costs well under a second; a
# changed lock file installs only what differs; an interrupted set-up is found and completed by the next run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=requirements/lock.txt
size="3.3 GB to download, 6.6 GB on disk"
folder=.venv
over=false # .venv, whose packages are found where this one has none of its own
if [[ ${1:-} == --docs ]]; then
  lock=requirements/docs.lock.txt
  size="20 MB to download, 160 MB on disk"
  folder=.venv-docs
  shift
elif [[ ${1:-} == --sglang && -f $root/requirements/sglang-${2:-}-cpu.lock.txt ]]; then
  lock=requirements/sglang-$2-cpu.lock.txt
  size=$(sed -n 's/^# Size: //p' "$root/$lock")
  folder=.venv-sglang-$2
  over=true
  shift 2
elif [[ ${1:-} == --sglang ]]; then
  lock=requirements/sglang-cpu.lock.txt
  size="25 MB to download, 140 MB on disk"
  folder=.venv-sglang
  over=true
  shift
elif [[ ${1:-} == --trl ]]; then
  lock=requirements/trl.lock.txt
  size="1 MB to download, 4 MB on disk"
  folder=.venv-trl
  over=true
  shift
elif [[ ${1:-} == --vllm ]]; then
  lock=requirements/vllm-${2:-}-cpu.lock.txt
  if [[ ! -f $root/$lock ]]; then
    printf 'setup: error: there is no %s\n' "$lock" >&2
    exit 1
  fi
  size=$(sed -n 's/^# Size: //p' "$root/$lock")
  folder=.venv-vllm-$2
  over=true
  shift 2
fi
venv=${1:-$root/$folder}
series=3.12

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

# A name on PATH proves nothing: pyenv's shims exist for versions that are not selected, and some
# distributions ship a Python without venv or ensurepip. So each candidate has to run and show all three.
is_usable() {
  "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$series')" \
    >/dev/null 2>&1
}

candidates() {
  command -v "python$series" || true
  command -v python3 || true
  local pyenv_root=${PYENV_ROOT:-$HOME/.pyenv} found
  for found in "$pyenv_root"/versions/"$series"*/bin/python; do
    if [[ -x $found ]]; then printf '%s\n' "$found"; fi
  done
  if command -v uv >/dev/null; then uv python find "$series" 2>/dev/null || true; fi
}

find_python() {
  local candidate
  while IFS= read -r candidate; do
    if is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done < <(candidates)
  if command -v uv >/dev/null; then
    say "no Python $series here; uv installs one (about 30 MB to download)" >&2
    uv python install "$series" >&2
    candidate=$(uv python find "$series")
    if is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  fi
  die "no working Python $series with venv and ensurepip: not on PATH, not under" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions, not from uv. Install one (apt install python$series-venv," \
    "pyenv install $series, or uv) and run this again."
}

# What the stamp attests: these requirements, this Python, and this checkout's package metadata.
stamp_of() {
  local version=$1
  printf 'python %s\nlock %s\npackage %s %s\n' "$version" \
    "$(sha256sum <"$root/$lock" | cut -d' ' -f1)" \
    "$(sha256sum <"$root/pyproject.toml" | cut -d' ' -f1)" "$root"
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true; }

mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
stamp=$venv/.rlrefit-setup

# Two set-ups of one environment (make demo beside make test) take turns; the second finds the work done.
exec 9>"$venv/.rlrefit-setup.lock"
flock 9

if [[ -f $stamp && $(<"$stamp") == "$(stamp_of "$(version_of "$python")")" ]]; then
  say "$venv is up to date"
  exit 0
fi
rm -f "$stamp"

making=$venv/.rlrefit-setup.making # there only while venv and ensurepip run, or after a kill in them
if [[ -f $making ]] || ! is_usable "$python" || ! "$python" -m pip --version >/dev/null 2>&1; then
  others=$(find "$venv" -mindepth 1 -maxdepth 1 ! -name '.rlrefit-setup*' -print -quit)
  if [[ -n $others && ! -f $venv/pyvenv.cfg && ! -d $venv/bin ]]; then
    die "$venv holds files but is no virtual environment; nothing was touched." \
      "Name another place (make VENV=… setup) or empty it."
  fi
  base=$(find_python)
  say "making $venv with $base ($(version_of "$base")); nothing to download"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name '.rlrefit-setup*' -exec rm -rf {} +
  touch "$making"
  "$base" -m venv "$venv"
  rm "$making"
fi

if $over; then
  below=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # A site folder, so that the links of what is installed editable are followed too.
  printf 'import site; site.addsitedir("%s")\n' "$below" \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rlrefit-venv.pth"
fi

wanted=$venv/.rlrefit-setup.wanted
"$python" "$root/requirements/pending.py" "$root/$lock" >"$wanted"
count=$(wc -l <"$wanted")
if ((count == 0)); then
  say "all packages of $lock are there and whole; nothing to download"
else
  say "installing $count of $(grep -c == "$root/$lock") packages of $lock" \
    "(all of them: $size; what pip has cached is not downloaded again)"
  # The lock is complete and pip could not resolve it (requirements/unresolvable.in says why).
  PYTHONUNBUFFERED=1 "$python" -m pip install --no-deps --disable-pip-version-check --progress-bar off \
    -r "$wanted" | awk -f "$root/requirements/downloads.awk"
fi

if [[ $folder == .venv ]]; then
  say "installing rlrefit itself, editable, from $root; nothing to download"
  "$python" -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e "$root"
fi

stamp_of "$(version_of "$python")" >"$stamp"
say "$venv is ready"
