#!/usr/bin/env bash
# Set-up of one machine: virtual environment, packages, off-screen renderer.  `make` runs it when .venv is out of date.
set -eu
cd "$(dirname "$0")/.."

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
}

find_python() {
    for name in python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "setup: no Python >= 3.11 found; run: apt-get install python3.11 python3.11-venv" >&2
    return 1
}

make_venv() {
    if "$PYTHON" -m venv .venv; then return; fi
    # Debian and Ubuntu ship Python without ensurepip.
    package="$("$PYTHON" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"
    if can_apt; then
        apt_install "$package"
        "$PYTHON" -m venv .venv
    else
        echo "setup: cannot make a virtual environment; run: sudo apt-get install $package" >&2
        return 1
    fi
}

has_renderer() {
    .venv/bin/python -c 'from envs.render import choose_renderer; choose_renderer()' 2>/dev/null
}

PYTHON="${PYTHON:-$(find_python)}"
[ -x .venv/bin/python ] || make_venv
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
if ! has_renderer; then
    if can_apt; then
        apt_install libosmesa6
    else
        echo "setup: no off-screen OpenGL library found; run: sudo apt-get install libosmesa6" >&2
        exit 1
    fi
fi
date >.venv/.stamp
