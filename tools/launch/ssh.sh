#!/usr/bin/env bash
# A run on hosts that are reached by ssh, a process each: bash THIS. Repository and --workdir lie on every host under
# the same path, the workdir on a disk that they share. Ctrl-C, or a SIGTERM, makes the run save and exit with 130;
# the same script goes on from there. A host that fails ends the run.
set -u
hosts=({{ hosts | map("shell_word") | join(" ") }})
repository={{ repository | shell_word }}
pid_file=/tmp/north_jax.{{ name }}.pid

stop() {
    for host in "${hosts[@]}"; do
        ssh -n "$host" "kill -TERM \$(cat $pid_file)" &
    done
}
trap stop INT TERM

running=()
for number in "${!hosts[@]}"; do
    # A session of its own: Ctrl-C reaches the run through `stop` alone.
    setsid ssh -n "${hosts[$number]}" "cd $(printf %q "$repository") && echo \$\$ > $pid_file && exec env \
JAX_COORDINATOR_ADDRESS=${hosts[0]##*@}:{{ port }} JAX_NUM_PROCESSES={{ hosts | length }} JAX_PROCESS_ID=$number \
.venv/bin/python -m north_jax.main --distributed"{{ arguments | shell | shell_word }} &
    running+=($!)
done

status=0
for process in "${running[@]}"; do
    # A signal ends `wait`, not what it waits for.
    while kill -0 "$process" 2>/dev/null; do wait "$process"; done
    wait "$process"
    code=$?
    if [ "$code" -gt "$status" ]; then status=$code; fi
done
exit "$status"
