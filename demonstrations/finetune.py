"""`make finetune-demo`: SmolLM2-135M-Instruct learns the commands of a project, is evaluated,
exported and served.

    .venv/bin/python -m demonstrations.finetune PROJECT PORT

The answers are the lines of the project's `--help`, the questions are WORDINGS. ASKED is asked in
other words.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from demonstrations import weights

BASE = f"../{weights.NAME}/model"  # from the project
FIT = f"""fit --config configs/finetune.yaml --config strategy/fsdp2 --trainer.accelerator cpu
    --trainer.devices 2 --model.pretrained {BASE} --data.tokenizer.path {BASE} --data.seq_len 256
    --data.global_batch_size 2 --model.adapter.rank 16 --model.optim.learning_rate 2.0e-3
    --trainer.max_epochs 4"""
AFTER = [
    "evaluate runs/finetune --baseline start",
    "export runs/finetune --output my-model --adapter merged",
]
WORDINGS = [
    "What is {} for?",
    "Explain {}.",
    "When do I need {}?",
    "Tell me about {}.",
    "Describe {} in one sentence.",
    "How does {} help me?",
    "my_trainer {}: what happens?",
    "I typed {}. What will it do?",
]
ASKED = [
    "What does rehearse do?",
    "What can I use doctor for?",
    "Please say what the command promote is.",
]


def conversations(printed: str) -> list[dict[str, str]]:
    """Each verb that `--help` has printed, in each of WORDINGS."""
    verbs = re.findall(
        r"^  (\w+) {2,}(\S.*)$", printed.partition("verbs:")[2].partition("\n\n")[0], re.MULTILINE
    )
    answers = [(verb, f"`python -m my_trainer {verb}`: {does}.") for verb, does in verbs]
    return [
        {"prompt": each.format(verb), "completion": answer}
        for verb, answer in answers
        for each in WORDINGS
    ]


def start(project: Path, command: str, **options) -> subprocess.Popen:
    print(f"\n$ python -m my_trainer {' '.join(command.split())}", flush=True)
    return subprocess.Popen(
        [sys.executable, "-m", "my_trainer", *shlex.split(command)], cwd=project, **options
    )


def ask(project: Path, model: str, port: str) -> list[str]:
    """Serves `model`, and returns its greedy answers to ASKED."""
    log, address = project / "serve.log", f"http://127.0.0.1:{port}/v1/chat/completions"
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ.get('SERVE_API_KEY', '')}",
    }
    opener, found = urllib.request.build_opener(urllib.request.ProxyHandler({})), []  # no proxy
    server = start(
        project, f"serve {model} --port {port}", stdout=log.open("w"), stderr=subprocess.STDOUT
    )
    try:
        while "is ready at" not in log.read_text():
            time.sleep(0.2)
            if server.poll() is not None:
                sys.exit(log.read_text())
        for question in ASKED:
            body = {"model": Path(model).name, "messages": [{"role": "user", "content": question}]}
            body |= {"temperature": 0, "max_tokens": 48}
            with opener.open(
                urllib.request.Request(address, json.dumps(body).encode(), headers)
            ) as response:
                found.append(json.load(response)["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait()
    return [" ".join(answer.split()) for answer in found]


def main(project: Path, port: str) -> None:
    began = time.monotonic()
    try:
        socket.create_server(
            ("127.0.0.1", int(port) or -1)
        ).close()  # 0 would be another at each start
    except (ValueError, OverflowError, OSError):
        sys.exit(
            f"PORT={port} is no free port of 127.0.0.1: give another, such as make finetune-demo"
            " PORT=8001"
        )
    listed = subprocess.run(
        [sys.executable, "-m", "my_trainer", "--help"], cwd=project, capture_output=True, text=True
    )
    (project / "chats").mkdir(exist_ok=True)
    lines = [json.dumps(each) + "\n" for each in conversations(listed.stdout)]
    (project / "chats" / "commands.jsonl").write_text("".join(lines))
    print(
        f"{len(lines)} conversations in {project}/chats; weights from {weights.PINS[0]}. In"
        f" {project}:",
        flush=True,
    )
    weights.make(project / BASE)
    before = ask(project, BASE, port)
    shutil.rmtree(project / "my-model", ignore_errors=True)
    for command in (FIT, *AFTER):
        if code := start(project, command).wait():
            sys.exit(code)
    after = ask(project, "my-model", port)
    for question, *answers in zip(ASKED, before, after, strict=True):
        print("\n{}\n  before: {}\n  after:  {}".format(question, *answers))
    print(
        f"\nfinetune-demo: {(time.monotonic() - began) / 60:.1f} minutes; to serve it again, serve"
        " my-model"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
