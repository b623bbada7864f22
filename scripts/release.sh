#!/usr/bin/env bash
# Builds what is published and tries it as users would: an sdist, a pure wheel, a compiled wheel for this Python.
#
#   scripts/release.sh [VERSION]      VERSION: whose notes to take from CHANGELOG.md; by default what is unreleased
#
# Everything goes into dist/. Each wheel is checked (twine), installed into a clean environment with its extras (pip check), imported,
# and runs the demo's replay; the sdist has to make the same pure wheel. Needs the network for pip.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH # what is tried is what was built
python=${PYTHON:-python3}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check build twine
rm -rf dist
echo "== sdist and pure wheel"
"$work/tools/bin/python" -m build --sdist --outdir dist . > "$work/sdist.log" 2>&1 || { tail -20 "$work/sdist.log"; exit 1; }
KVYARD_PURE=1 "$work/tools/bin/python" -m build --wheel --outdir dist dist/*.tar.gz > "$work/pure.log" 2>&1 || { tail -20 "$work/pure.log"; exit 1; }
if [ -z "${KVYARD_PURE:-}" ]; then
    echo "== compiled wheel (about a minute)"
    KVYARD_COMPILE=1 "$work/tools/bin/python" -m build --wheel --outdir dist . > "$work/wheel.log" 2>&1 || { tail -20 "$work/wheel.log"; exit 1; }
fi
"$work/tools/bin/twine" check --strict dist/*

for wheel in dist/*.whl; do
    echo "== $(basename "$wheel"), in a clean environment"
    venv=$work/venv-$(basename "$wheel" .whl)
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "kvyard[all] @ file://$PWD/$wheel"
    "$venv/bin/pip" check
    (
        cd "$work" # not beside the source
        "$venv/bin/python" -c 'import kvyard, kvyard.testing; from kvyard.blocks import pool; print(kvyard.__version__, pool.__file__.rpartition("/")[2])'
        "$venv/bin/kvyard" --version
        time "$venv/bin/kvyard" replay "$OLDPWD/examples/data/mooncake_conversation.jsonl.xz" --limit 1000 --html "$work/report.html" -q
        [ -s "$work/report.html" ]
    )
done

"$python" scripts/release_notes.py "$@" > dist/NOTES.md
ls -l dist
