#!/usr/bin/env bash
# A step of continuous integration: fails when a launch fails, records are incomplete or the losses part.
#
#   bash runners/ci.sh [SPEC] [option of `dcpbench run` ...]
#   bash runners/ci.sh quick_4xcpu
#   BASELINE_RUN=runs/main bash runners/ci.sh quick_4xcpu  # fails as well where dcp is slower than in that run
#   DRY_RUN=1 bash runners/ci.sh quick_4xcpu               # shows the launches and starts nothing
#
# Needs dcpbench on PATH. Leaves the run folder in OUTPUT_DIR (default: runs/ci) for upload as an artifact,
# and appends the report to the job summary where the CI names one (GITHUB_STEP_SUMMARY). An inconclusive
# result (exit code 3) is a warning; every other exit code of `dcpbench run` is passed on.
set -euo pipefail

spec=${1:-quick_4xcpu}
shift || true

if [[ ${DRY_RUN:-0} != 0 ]]; then
    exec dcpbench run "$spec" "$@" --dry-run
fi

export OUTPUT_DIR=${OUTPUT_DIR:-runs/ci}
status=0
dcpbench run "$spec" "$@" || status=$?

report=$OUTPUT_DIR/analysis/report.md
if [[ -n ${GITHUB_STEP_SUMMARY:-} && -f $report ]]; then
    cat "$report" >>"$GITHUB_STEP_SUMMARY"
fi
if ((status == 3)); then
    echo "dcpbench: inconclusive, taken as a warning" >&2
    status=0
fi
if ((status == 0)) && [[ -n ${BASELINE_RUN:-} ]]; then
    dcpbench compare "$OUTPUT_DIR" --baseline-run "$BASELINE_RUN" || status=$?
    if [[ -n ${GITHUB_STEP_SUMMARY:-} ]]; then
        dcpbench compare "$OUTPUT_DIR" --baseline-run "$BASELINE_RUN" --format summary >>"$GITHUB_STEP_SUMMARY" || true
    fi
fi
if ((status == 0)); then
    dcpbench manifest "$OUTPUT_DIR" --check
fi
exit "$status"
