#!/usr/bin/env bash
# Sets up .venv-sglang, SGLang's own environment: argument cpu (the default), or gpu for SGLang as it is published.
# Run again it does nothing, unless its requirements or this file changed.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
python=${PYTHON:-python3}
requirements=north_jax/sampler/sglang/requirements-cpu.txt
sglang=sglang==0.5.23

say() { printf 'setup: %s\n' "$*"; }
install() { .venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

case $device in cpu | gpu) ;; *) say "usage: tools/setup_sglang.sh cpu|gpu"; exit 2 ;; esac
stamp=.venv-sglang/.north_jax-$device
if [ ! -e "$stamp" ] || [ "$requirements" -nt "$stamp" ] || [ tools/setup_sglang.sh -nt "$stamp" ]; then
    say "installing $sglang for the $device into .venv-sglang (a minute or two)"
    [ -x .venv-sglang/bin/python ] || "$python" -m venv .venv-sglang
    rm -f .venv-sglang/.north_jax-*
    if [ "$device" = cpu ]; then
        install -r "$requirements"
        install --no-deps "$sglang" torchvision==0.28.0
    else
        install "$sglang"
    fi
    touch "$stamp"
fi
