"""Hosts on loopback: an sshd of this user with its own keys, and an ssh that knows it by several
names."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
LACKING = (
    ""
    if Path(SSHD).exists() and shutil.which("ssh-keygen")
    else "needs sshd and ssh-keygen (openssh-server)"
)

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
"""

CLIENT = """\
Host node1 node2
  HostName 127.0.0.1
  Port {port}
Host down
  HostName 127.0.0.1
  Port 1
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking no
  BatchMode yes
  LogLevel ERROR
"""


class Hosts:
    """`node1` and `node2` are this machine; `down` refuses connections. `ssh` is the command that
    knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ssh = folder, f"ssh -F {folder}/config"

    def __enter__(self) -> Hosts:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its privileges
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        for name in ("host", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name],
                check=True,
            )
        for name, text in (("server", SERVER), ("config", CLIENT)):
            (self.folder / name).write_text(text.format(port=self.port, folder=self.folder))
        with (self.folder / "sshd.log").open("wb") as log:
            command = [SSHD, "-D", "-e", "-f", str(self.folder / "server")]
            self.server = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(100):
            words = [*self.ssh.split(), "node1", "true"]
            if not subprocess.run(words, capture_output=True, check=False).returncode:
                return self
            time.sleep(0.1)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def __exit__(self, *_: object) -> None:
        self.server.terminate()
        self.server.wait()
