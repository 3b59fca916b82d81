#!/usr/bin/env bash
# One machine with GPUs, from nothing to a checked result.
#
#   bash runners/gpu_machine.sh [SPEC] [option of `dcpbench run` ...]
#   bash runners/gpu_machine.sh mock_2xh200 --pairs 6
#   DRY_RUN=1 bash runners/gpu_machine.sh mock_2xh200      # shows the launches and starts nothing
#
# SPEC is a file or the name of a spec that comes with dcpbench; default: mock_2xh200. The run folder is
# OUTPUT_DIR, or a new one below runs/. Uses the `dcpbench` on PATH; without one, the checkout that this
# file lies in is installed into .venv there. Exits with the exit code of `dcpbench run`.
set -euo pipefail

spec=${1:-mock_2xh200}
shift || true

echo "== 1. dcpbench"
if ! command -v dcpbench >/dev/null; then
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ ! -f $root/pyproject.toml ]]; then
        echo "there is no dcpbench on PATH and $root is no checkout; install dcpbench first" >&2
        exit 2
    fi
    if [[ ! -x $root/.venv/bin/dcpbench ]]; then
        python3 -m venv "$root/.venv"
        (cd "$root" && .venv/bin/python -m pip install --constraint constraints.txt --editable '.[data,gpu]')
    fi
    PATH=$root/.venv/bin:$PATH
fi
dcpbench --version

if [[ ${DRY_RUN:-0} != 0 ]]; then
    exec dcpbench run "$spec" "$@" --dry-run
fi

echo "== 2. this machine"
dcpbench check

echo "== 3. the comparison"
name=$(basename "$spec" .yaml)
export OUTPUT_DIR=${OUTPUT_DIR:-runs/$name-$(date -u +%Y%m%d-%H%M%S)}
status=0
dcpbench run "$spec" "$@" || status=$?

echo "== 4. its manifest"
if [[ -f $OUTPUT_DIR/manifest.json ]]; then
    dcpbench manifest "$OUTPUT_DIR" --check
fi
echo "exit code $status; the report is $OUTPUT_DIR/analysis/report.md"
exit "$status"
