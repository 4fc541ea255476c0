"""The sandbox in a container of a Docker Engine (API 1.41 or newer), through the `docker` SDK.

The engine's address comes from DOCKER_HOST. The driver is the container's first process, spoken to over the attached
standard streams; when this process dies the stream closes, the driver ends and the engine removes the container.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
from pathlib import Path

import docker
import docker.errors

from north_jax.envs import seccomp
from north_jax.envs.sandbox import (
    DRIVER_ARGUMENTS,
    ENV,
    SCRATCH,
    VAULT,
    WORK,
    Limits,
    Sandbox,
    SandboxUnavailable,
    Wire,
)

REPOSITORY = "north_jax-sandbox"
_USER = "1000:1000"
_REQUIRED = "bash", "coreutils", "findutils", "grep", "sed", "python3-minimal"
_OPTIONAL = (
    *("dash", "mawk", "diffutils", "tar", "gzip", "procps", "util-linux", "hostname", "git", "tmux", "patch", "less"),
    *("ncurses-base", "ncurses-bin", "libc-bin", "base-files", "debianutils", "bsdutils", "media-types", "netbase"),
)
_UNWANTED = (
    *("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/perl"),
    *("/usr/share/lintian/", "/usr/share/bug/", "/usr/share/gitweb/", "/usr/lib/x86_64-linux-gnu/perl"),
)
_building = threading.Lock()


class DockerSandbox(Sandbox):
    """A container of `image`, which must hold bash and /usr/bin/python3; by default the one `host_image` makes.

    Raises SandboxUnavailable when the engine does not answer.
    """

    def __init__(self, limits: Limits | None = None, image: str | None = None):
        super().__init__(limits)
        with contextlib.closing(_connect()) as client:
            self._image = image or host_image(client)
        self._client: docker.DockerClient | None = None
        self._container: str | None = None
        self._stream = None

    def _launch(self) -> Wire:
        limits, mib = self.limits, 1 << 20
        owner = "uid=1000,gid=1000,nosuid,nodev,exec"
        self._client = _connect()
        api = self._client.api
        try:
            host_config = api.create_host_config(
                network_mode="none",
                ipc_mode="private",
                read_only=True,
                tmpfs={
                    WORK: f"size={limits.box_mib}m,mode=0755,{owner}",
                    "/tmp": f"size={limits.tmp_mib}m,mode=1777,{owner}",
                    VAULT: f"size=32m,mode=0755,{owner}",
                },
                shm_size=32 * mib,
                mem_limit=limits.memory_mib * mib,
                memswap_limit=limits.memory_mib * mib,
                pids_limit=limits.pids + 1,
                nano_cpus=int(limits.cpus * 1e9),
                cap_drop=["ALL"],
                security_opt=["no-new-privileges", "seccomp=" + seccomp.docker_profile()],
                log_config={"type": "none"},
                auto_remove=True,
                init=False,
            )
            created = api.create_container(
                self._image,
                command=["/usr/bin/python3", *DRIVER_ARGUMENTS],
                entrypoint=[],
                user=_USER,
                stdin_open=True,
                hostname="box",
                working_dir=WORK,
                environment={"PATH": ENV["PATH"]},
                labels={"north_jax": "sandbox"},
                host_config=host_config,
            )
            self._container = created["Id"]
            options = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self._stream = api.attach_socket(self._container, params=options)
            wire = Wire(getattr(self._stream, "_sock", self._stream), framed=True)
            api.start(self._container)
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailable(f"the Docker Engine has no image {self._image}: load or build it first") from error
        except docker.errors.DockerException as error:
            raise SandboxUnavailable(f"the Docker Engine could not start the sandbox: {error}") from error
        return wire

    def _scratch(self) -> list[str]:
        return [*SCRATCH, "/dev/mqueue"]

    def _explain(self, complaint: str) -> str:
        return (
            f"the sandbox in image {self._image} could not be started ({complaint or 'no reason given'}): "
            f"the image must hold /bin/bash and /usr/bin/python3 (3.9 or newer)"
        )

    def _kill(self) -> str:
        client, container, stream = self._client, self._container, self._stream
        self._client = self._container = self._stream = None
        if stream is not None:
            # The SDK keeps the HTTP response in the stream so that it is not collected; it owns a file on the socket.
            response = getattr(stream, "_response", None)
            if response is not None:
                response.close()
            stream.close()
        if client is not None:
            # The engine may have removed it by itself, or be gone.
            with contextlib.suppress(docker.errors.DockerException, OSError):
                if container is not None:
                    client.api.remove_container(container, force=True, v=True)
            client.close()
        return ""


def _connect() -> docker.DockerClient:
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    client = None
    try:
        if address.startswith("unix://"):
            # Tried by ourselves first, for the SDK leaves the socket of a failed attempt open.
            with socket.socket(socket.AF_UNIX) as attempt:
                attempt.connect(address.removeprefix("unix://"))
        client = docker.from_env(timeout=60)
        client.ping()
        return client
    except (docker.errors.DockerException, OSError) as error:
        if client is not None:
            client.close()
        raise SandboxUnavailable(
            f"no Docker Engine answers at {address}: start dockerd, or set DOCKER_HOST to its address"
        ) from error


def host_image(client: docker.DockerClient) -> str:
    """The tag of an image made of this Debian machine's own files (shell, core tools, Python), built when absent.

    Nothing is pulled. The tag changes with the packages' versions. Raises SandboxUnavailable where there is no dpkg
    or a needed package is not installed.
    """
    if shutil.which("dpkg-query") is None:
        raise SandboxUnavailable("the sandbox image is built from Debian packages and this machine has no dpkg-query")
    python = os.path.basename(os.path.realpath("/usr/bin/python3"))
    packages = [*_REQUIRED, *_OPTIONAL, f"{python}-minimal", f"lib{python}-minimal", f"lib{python}-stdlib"]
    listing = _output(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n", *packages])
    installed = [line.split()[1:] for line in listing.splitlines() if line.startswith("installed ")]
    names = [name for name, _ in installed]
    for name in (*_REQUIRED, f"lib{python}-stdlib"):
        if name not in names:
            raise SandboxUnavailable(f"the sandbox image needs the package {name}: run `apt-get install {name}`")
    version = hashlib.sha256(repr((1, platform.machine(), sorted(installed))).encode()).hexdigest()[:12]
    tag = f"{REPOSITORY}:{version}"
    with _building:
        try:
            client.images.get(tag)
        except docker.errors.ImageNotFound:
            with tempfile.NamedTemporaryFile(suffix=".tar") as file:
                _pack(file, _host_files(names))
                file.flush()
                client.api.import_image(file.name, repository=REPOSITORY, tag=version)
            client.images.get(tag)
    return tag


def _host_files(packages: list[str]) -> set[str]:
    """The packages' files, the libraries these are linked with, and what their links lead to."""
    files = set()
    for line in _output(["dpkg-query", "-L", *packages]).splitlines():
        if line.startswith("/") and not line.startswith(_UNWANTED) and "__pycache__" not in line:
            # Older packages say /bin where the file lies in /usr/bin.
            path = os.path.join(os.path.realpath(os.path.dirname(line)), os.path.basename(line))
            if path.startswith(("/usr/", "/etc/")) and (os.path.islink(path) or os.path.isfile(path)):
                files.add(path)
    files |= {f"/usr/lib/locale/C.utf8/{name}" for name in _names_below("/usr/lib/locale/C.utf8")}
    files.add("/usr/bin/awk")
    todo = list(files)
    while todo:
        path = todo.pop()
        if os.path.islink(path):
            target = os.path.join(os.path.dirname(path), os.readlink(path))
            target = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))
            if target not in files and (os.path.islink(target) or os.path.isfile(target)):
                files.add(target)
                todo.append(target)
    binaries = [path for path in sorted(files) if not os.path.islink(path) and _is_elf(path)]
    libraries = set()
    for line in _output(["ldd", *binaries]).splitlines():
        words = line.replace("=>", " ").split()
        libraries |= {word for word in words if word.startswith("/") and not word.endswith(":")}
    for library in libraries:
        while True:
            path = os.path.join(os.path.realpath(os.path.dirname(library)), os.path.basename(library))
            files.add(path)
            if not os.path.islink(path):
                break
            library = os.path.join(os.path.dirname(path), os.readlink(path))
    return {path for path in files if path.startswith(("/usr/", "/etc/alternatives/")) and os.path.lexists(path)}


def _pack(file, paths: set[str]) -> None:
    """Write the root file system as a tar archive, everything owned by root."""
    etc = {
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:{WORK}:/bin/bash\n",
        "group": "root:x:0:\nuser:x:1000:\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }

    def rooted(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode &= 0o755  # no set-uid bits
        return entry

    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        parents = {str(parent) for path in paths for parent in Path(path).parents}
        empty = {"/proc", "/sys", "/dev", "/run", "/root", "/var", "/tmp", "/usr/sbin", "/usr/lib64", "/etc", WORK}
        for directory in sorted((parents | empty) - {"/"}):
            entry = tarfile.TarInfo(directory.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path in sorted(paths):
            tar.add(path, arcname=path.lstrip("/"), recursive=False, filter=rooted)
        for name, text in etc.items():
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))


def _names_below(directory: str) -> list[str]:
    root = Path(directory)
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def _is_elf(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _output(command: list[str]) -> str:
    # Exit codes are not errors here: dpkg-query says 1 for a package not installed, ldd for a static program.
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
