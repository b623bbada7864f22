#!/usr/bin/env bash
# Provides the programs that some tests need besides Python packages.
#
# Such tests carry a marker (redis, browser, wrk) and skip themselves where the program is missing, so this script never fails:
# what it can't provide it names in one line. It costs nothing when everything is there.
#
# To add a program, add a line to NEEDS together with the first test that needs it:
#
#     "<command looked for> <Debian package> <pytest marker>"
set -uo pipefail

NEEDS=(
    "redis-server redis-server redis"
    "chromium chromium browser"
    "wrk wrk wrk"
)

missing=()
for need in ${NEEDS[@]+"${NEEDS[@]}"}; do
    read -r program _ <<<"$need"
    command -v "$program" >/dev/null || missing+=("$need")
done
[ ${#missing[@]} -gt 0 ] || exit 0

can_install=no
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    can_install=yes
    export DEBIAN_FRONTEND=noninteractive
    # A mirror that fails once is asked again, and another apt-get is waited for.
    apt=(apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120)
    "${apt[@]}" update </dev/null >/dev/null 2>&1
fi
for need in "${missing[@]}"; do
    read -r program package marker <<<"$need"
    if [ $can_install = yes ] &&
        "${apt[@]}" install -y --no-install-recommends "$package" </dev/null >/dev/null 2>&1 &&
        command -v "$program" >/dev/null; then
        echo "installed $package for the tests marked '$marker'"
    elif [ $can_install = yes ]; then
        echo "skipping the tests marked '$marker': apt-get could not install $package"
    else
        echo "skipping the tests marked '$marker': $program is missing (on Debian: apt-get install $package, as root)"
    fi
done
exit 0
