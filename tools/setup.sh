#!/usr/bin/env bash
# Sets up what `make demo` (argument: demo) and `make test` (argument: test) need: Debian packages and .venv,
# the tests also SGLang's .venv-sglang.
# Run again it does nothing, unless pyproject.toml or this file changed.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?usage: tools/setup.sh demo|test}
python=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*"; }

# -- programs ---------------------------------------------------------------------------------------------------------
packages=()
command -v bwrap >/dev/null || packages+=(bubblewrap)
test -x /usr/bin/python3 || packages+=(python3-minimal) # the sandbox's own Python
"$python" -c 'import venv, ensurepip' 2>/dev/null || packages+=(python3-venv)
if [ "$kind" = test ]; then
    command -v dockerd >/dev/null || packages+=(docker.io)
    command -v chromium >/dev/null || packages+=(chromium)
fi
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    else
        say "please install: ${packages[*]} (Debian: apt-get install ${packages[*]})"
        case " ${packages[*]} " in *" bubblewrap "* | *" python3-"*) exit 1 ;; esac
    fi
fi

# -- the Python environment -------------------------------------------------------------------------------------------
stamp=.venv/.north_jax-$kind
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ tools/setup.sh -nt "$stamp" ]; then
    [ -x .venv/bin/python ] || { say "creating .venv with $("$python" --version)"; "$python" -m venv .venv; }
    say "installing Python packages (a minute or two)"
    if [ "$kind" = test ]; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
    else
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e .
    fi
    touch "$stamp"
fi
if [ "$kind" = test ]; then
    tools/setup_sglang.sh cpu
fi
say "ready"
