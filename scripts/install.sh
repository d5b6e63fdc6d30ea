#!/bin/sh
# Makes the virtual environment and installs Plait into it, with a torch that fits the machine: on a machine
# without a GPU the CUDA build, and the gigabytes of libraries it brings, are not installed.
#
#   PYTHON=python3  VENV=.venv  EXTRAS="[test]"   which interpreter, where, which extras
#   TORCH="torch==2.13.0"                         another requirement for torch
#   PLAIT_CUDA=1                                  install the CUDA build although no GPU was found
set -eu

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
EXTRAS="${EXTRAS:-}"
TORCH="${TORCH:-torch==2.13.0}"

"$PYTHON" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python {sys.version.split()[0]}\nPlait needs Python 3.11 or later.\nName another: make PYTHON=python3.12 ...")
PY

if [ ! -x "$VENV/bin/python" ]; then
    echo "Making the virtual environment $VENV"
    "$PYTHON" -P -m venv "$VENV" || {
        echo "python3 -m venv failed: on Debian, venv is a package of its own (apt-get install python3-venv)." >&2
        exit 2
    }
fi
# -P: a file pip.py or venv.py of the current folder must not run.
PIP="$VENV/bin/python -P -m pip --disable-pip-version-check"

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }
has_torch() { "$VENV/bin/python" -c "import importlib.metadata as m; m.version('torch')" 2>/dev/null; }
brings_cuda() {
    $PIP install --quiet --dry-run --report - "$1" 2>/dev/null | "$VENV/bin/python" -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
sys.exit(0 if any(name.startswith(("nvidia-", "cuda-")) for name in names) else 1)' 2>/dev/null  # pip says below what is wrong
}

if ! has_torch; then
    if ! has_gpu && [ -z "${PLAIT_CUDA:-}" ] && brings_cuda "$TORCH"; then
        cat >&2 <<MESSAGE
No GPU was found, and "$TORCH" from this package index would install the CUDA build (gigabytes).
Give pip an index that has the CPU build (pytorch.org, "Get Started", shows it for your system), as in
    PIP_EXTRA_INDEX_URL=<that index> make sweep
or install the CUDA build all the same:
    PLAIT_CUDA=1 make sweep
MESSAGE
        exit 2
    fi
    echo "Installing $TORCH: some minutes, most of them for the download"
    $PIP install --quiet "$TORCH"
fi
# torch is there by now, so that nothing below chooses another build of it.
echo "Installing Plait and the libraries that it needs"
$PIP install --quiet --editable ".$EXTRAS"
echo "Plait is installed. Now: . $VENV/bin/activate, then plait --help"
