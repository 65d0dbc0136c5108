#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# One agentrl run over the nodes of a Slurm job: docs/how-to/several_gpus.md#several-machines. Not tested with Slurm itself.
# RUNS must be a local disk of the first node.
set -euo pipefail
RUNS=${RUNS:-/local/$USER/runs}
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(on "${nodes[0]}" hostname --ip-address | awk '{print $1}')
on "${nodes[0]}" ray start --block --head --node-ip-address="$head" --port=6379 --include-dashboard=false --disable-usage-stats &
for node in "${nodes[@]:1}"; do
    on "$node" ray start --block --address="$head:6379" --disable-usage-stats &
done
joined() { on "${nodes[0]}" python -c "import ray; ray.init('$head:6379', log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"; }
for _ in {1..300}; do
    [ "$(joined)" = "${#nodes[@]}" ] && break
    sleep 1
done
[ "$(joined)" = "${#nodes[@]}" ] || { echo "not all nodes joined Ray within five minutes" >&2; exit 1; }

on "${nodes[0]}" agentrl train run.toml --cluster.address="$head:6379" --directory="$RUNS"
