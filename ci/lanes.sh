# Lanes of work side by side, for ci/run. A lane is functions; in them `stage NAME` begins a part, and `COMMAND || missed`
# goes on after a failure and lets the lane fail at its end. Any other failure ends it at once. $work is a folder to write in.

stage() { at=$1; printf '\n=== %s (%s s)\n' "$1" "$SECONDS"; }

missed() { echo "!!! exit code $? at $SECONDS s: $at"; failed=1; }

unsteady() {  # After pytest: a few tests that failed are to be tried again, alone. All else has failed.
    local code=$? count
    count=$(python3 -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))' || echo many)
    if [ $code = 1 ] && [[ $count =~ ^[1-8]$ ]]; then touch "$work/unsteady"; else (exit $code) || missed; fi
}

lane() {  # NAME STEP... &: the steps one after another (before || bash would go on after failures)
    local name=$1
    shift
    (
        set -eE
        trap missed ERR
        for step in "$@"; do "$step"; done
        exit "${failed:-0}"
    ) 2>&1 | sed -u "s/^/[$name] /" | tee "$work/$name.lane"
}

told() { echo; grep -hE "$@" "$work"/*.lane | cut -c 1-240 || true; }

again() {  # Of a long output often only the end is read: there all that failed is told once more, the shortest last.
    told -m 60 '^\[\w+\] (_+ .+ _+$|E   |(wrong|error|unexpected pass|stale|unproved) )'  # what tests and laws found
    told -B 8 '^\[\w+\] !!! '  # the end of each stage that failed
    told -m 60 '^\[\w+\] (FAILED|ERROR) tests/'
    told '^\[\w+\] !!! '
}
