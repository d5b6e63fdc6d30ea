#!/bin/sh
# A browser and a database server for the tests that use real ones. Without root or apt-get they are not
# installed, and those tests are skipped, saying so.
set -eu

[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0

missing=""
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
command -v chromedriver >/dev/null 2>&1 || missing="$missing chromium-driver"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
[ -n "$missing" ] || exit 0

echo "Installing for the tests:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list of packages
apt-get install -y -qq --no-install-recommends $missing >/dev/null
