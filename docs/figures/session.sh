#!/usr/bin/env bash
# Records docs/figures/session.svg: generate a project, train on two CPU processes, kill them, resume. It takes two
# minutes; pauses are shortened to three seconds. The environment needs this repository's packages (make setup), and
#   pip install asciinema && npm install --global svg-term-cli && docs/figures/session.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ "${1:-}" != play ]; then
  folder=$(mktemp -d -t session.XXXX)
  trap 'rm -rf "$folder"' EXIT
  ln -s "$here/../.." "$folder/dist-template"
  (cd "$folder" && asciinema rec --quiet --overwrite --cols 104 --rows 30 --idle-time-limit 3.0 \
    --command "'$here/session.sh' play" session.cast)
  svg-term --in "$folder/session.cast" --out "$here/session.svg" --window --no-cursor
  exit
fi

# Types a command and runs it; `set -m` gives the background job a number and a process group, as in a terminal.
set -m
say() {
  local text=$1
  printf '%s\e[1;32m$\e[0m ' "${2:-}"
  for ((i = 0; i < ${#text}; i += 6)); do printf '%s' "${text:i:6}"; sleep 0.12; done
  printf '\n'
}
enter() { say "$@" && eval "$1"; }

export PYTHONUNBUFFERED=1 TERM=xterm-256color
enter 'cookiecutter dist-template --no-input'
enter 'cd my-trainer                     # make setup builds .venv: a few minutes, not shown'
fit='python -m my_trainer fit --config configs/quickstart.yaml --trainer.max_steps 60'
enter "$fit --last_checkpoint.every_n_steps 20 &"
until ls -d runs/quickstart/*/checkpoints/step00000040.ckpt >/dev/null 2>&1; do jobs %1 >/dev/null; sleep 0.2; done
sleep 2
enter 'kill -9 %1                        # both processes' $'\n'  # below the progress line
wait %1 2>/dev/null || true
sleep 1
enter "$fit --ckpt_path last"
for ((i = 0; i < 3; i++)); do sleep 3; printf '\e[0m'; done  # time to read
