#!/usr/bin/env bash
# Sets up, then trains a small language model on this machine. Run it again, or kill it and run
# it again: it goes on where the published history ends.
# Arguments go to the run: bash scripts/quickstart.sh --set training.updates=50

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd "$project"
exec "$venv/bin/coherent-ray" run configs/quickstart.yaml "$@"
