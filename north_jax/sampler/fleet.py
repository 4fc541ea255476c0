"""Many sampling servers behind the interface of one: choice, health, return with the right weights, and the push."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from north_jax.sampler.answer import Busy, Generation, Increment, Lost, SamplerError, SamplerUnavailable
from north_jax.sampler.checksums import FolderSums
from north_jax.sampler.client import Asker, Check, SamplerClient
from north_jax.sampler.process import SamplerProcess
from north_jax.sampler.push import Loaded, Push, WeightFolders, load, prepare, prove, weight_bytes

BLOCK = 64  # tokens; prefixes are compared in steps of it
REMEMBERED = 1 << 16  # blocks of prefix per server
MISSES = 3  # health checks in a row that a server may fail
CONTROL_S = 10.0  # for calls that a healthy server answers at once


@dataclasses.dataclass(eq=False)
class _Member:
    """One server. `epoch` counts its ejections: an answer begun in an earlier one is not used."""

    client: SamplerClient
    process: SamplerProcess | None
    serving: bool = False
    why: str = "not seen yet"
    version: str | None = None
    open: int = 0
    misses: int = 0
    epoch: int = 0
    pushing: bool = False
    prefixes: OrderedDict[int, None] = dataclasses.field(default_factory=OrderedDict)

    def shared(self, chain: list[int]) -> int:
        """How many of the prompt's blocks it has seen, from the first on."""
        return next((at for at, block in enumerate(chain) if block not in self.prefixes), len(chain))

    def remember(self, chain: list[int]) -> None:
        for block in chain:
            self.prefixes[block] = None
            self.prefixes.move_to_end(block)
        while len(self.prefixes) > REMEMBERED:
            self.prefixes.popitem(last=False)


class SamplerFleet(Asker):
    """Asks the best of several servers; use as an async context manager. `generate` and `stream` are as of Asker.

    servers: URLs, or `SamplerProcess`es, which are started and started again. vocab_size, context, timeout_s, experts:
    as of SamplerClient. folder, version: what all must serve from the start; without, whatever they do until the first
    push. folders: where pushed versions are staged and collected.

    Choice: of the servers with at most 4 + 1.5 times the open requests of the least loaded one, the one that has seen
    most of the prompt's blocks of 64 tokens; among equals the least loaded. So the members of a group and the turns
    of a conversation meet their cached prefix, unless its server is clearly busier.

    A server is ejected when a connection to it breaks, when it fails three health checks, when its answer names a
    version that was no longer live when the request was sent, and when a push to it fails; its open requests go to
    others. It returns once it is healthy and its weights are proved to be the live ones, which it is given if not.
    """

    def __init__(
        self,
        servers: Sequence[SamplerProcess | str],
        *,
        folder: str | os.PathLike | None = None,
        version: str | int | None = None,
        folders: WeightFolders | None = None,
        health_s: float = 1.0,
        push_s: float = 600.0,
        **about,
    ):
        super().__init__(**about)
        self._servers, self._about, self._health_s, self._push_s = list(servers), about, health_s, push_s
        self.folders = folders or WeightFolders()
        self._members: list[_Member] = []
        self._live: tuple[Path, str, FolderSums] | None = None
        if folder is not None:
            path = self.folders.stage(folder, str(version))
            self._live = path, str(version), FolderSums(path)
        self._history = [] if self._live is None else [self._live[1]]
        self._lock = asyncio.Lock()  # weights change under it
        self._returned = asyncio.Condition()
        self._tasks: list[asyncio.Task] = []

    async def __aenter__(self) -> "SamplerFleet":
        # A SamplerProcess has its port, and so its URL, from its first start on.
        for server in self._servers:
            if self._live is not None and not isinstance(server, str):
                server.checkpoint = self._live[0]
        started = (asyncio.to_thread(s.ensure_alive) for s in self._servers if not isinstance(s, str))
        await asyncio.gather(*started, return_exceptions=True)  # the watch tries again, and says why
        for server in self._servers:
            process = None if isinstance(server, str) else server
            client = SamplerClient(server if process is None else process.url, retry=False, **self._about)
            self._members.append(_Member(client, process))
        self._tasks = [asyncio.create_task(self._watch(member)) for member in self._members]
        return self

    async def __aexit__(self, *_) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            await member.client.close()

    @property
    def version(self) -> str | None:
        """The version that is live: every serving server has proved to hold it."""
        return None if self._live is None else self._live[1]

    def status(self) -> list[dict]:
        """Per server: its url, whether it serves, why not, its open requests, and the version it last proved."""
        return [
            {"url": m.client.url, "serving": m.serving, "why": m.why, "open": m.open, "version": m.version}
            for m in self._members
        ]

    async def ready(self, servers: int = 1, timeout_s: float | None = None) -> None:
        """Waits until so many servers serve. Errors: SamplerUnavailable, with what keeps the others."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._returned:
                await self._returned.wait_for(lambda: sum(m.serving for m in self._members) >= servers)
        except TimeoutError:
            raise SamplerUnavailable(
                f"not {servers} of {len(self._members)} samplers serve after {timeout_s:g} s: {self._absent()}"
            ) from None

    async def abort(self, rid: str | None = None) -> None:
        """As Asker.abort."""
        if rid in self._wires:
            server, wire = self._wires[rid]
            await server.abort(wire)
        else:
            clients = [member.client for member in self._members if member.serving]
            await asyncio.gather(*(client.abort(rid) for client in clients), return_exceptions=True)

    # -- choice -------------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"{len(self._members)} samplers ({self._absent() or 'all serve'})"

    def _absent(self) -> str:
        return "; ".join(f"{m.client.url}: {m.why}" for m in self._members if not m.serving)

    def _choose(self, chain: list[int]) -> _Member | None:
        serving = [member for member in self._members if member.serving]
        if not serving:
            return None
        least = min(member.open for member in serving)
        near = [member for member in serving if member.open <= 4 + 1.5 * least]
        return max(near, key=lambda member: (member.shared(chain), -member.open))

    @contextlib.asynccontextmanager
    async def _server_for(self, body: dict) -> AsyncIterator[tuple[SamplerClient, Check]]:
        chain = _chain(body["input_ids"])
        while (member := self._choose(chain)) is None:
            async with self._returned:
                await self._returned.wait_for(lambda: any(m.serving for m in self._members))
        epoch, since = member.epoch, len(self._history) - 1

        def check(answer: Generation | Increment) -> None:
            if member.epoch != epoch:
                raise Lost(f"{member.client.url} was ejected while it answered ({member.why})")
            # Without a live version at the start nothing is known of what was right then.
            odd = {version for *_, version in answer.versions} - set(self._history[max(since, 0) :])
            if since >= 0 and odd:
                raise Lost(f"{member.client.url} answered with version {min(odd)}, which was not live")

        member.open += 1
        member.remember(chain)
        try:
            yield member.client, check
        except Busy:
            raise
        except Lost as error:
            if member.epoch == epoch and not member.pushing:  # of a server in a push, the push judges
                self._eject(member, str(error))
            raise
        finally:
            member.open -= 1

    # -- health -------------------------------------------------------------------------------------------------------

    def _eject(self, member: _Member, why: str) -> None:
        member.serving, member.why, member.misses, member.version = False, why, 0, None
        member.epoch += 1
        member.prefixes.clear()
        member.client.hang_up()  # whoever waits for it asks another

    async def _watch(self, member: _Member) -> None:
        while True:
            if not member.serving:
                try:
                    await self._admit(member)
                except Exception as error:  # whatever it is, it may be gone at the next look
                    member.why = str(error) or repr(error)
            elif not member.pushing:
                epoch = member.epoch
                dead = member.process is not None and not member.process.alive
                healthy = not dead and await member.client.health()
                if member.serving and member.epoch == epoch and not member.pushing:
                    member.misses = 0 if healthy else member.misses + 1
                    if dead or member.misses >= MISSES:
                        self._eject(member, "its process ended" if dead else f"{MISSES} health checks failed")
                        continue
            await asyncio.sleep(self._health_s)

    async def _admit(self, member: _Member) -> None:
        """Has a server serve, with the live weights and no others."""
        if member.process is not None:
            await asyncio.to_thread(member.process.ensure_alive)
        if not await member.client.health():
            raise SamplerError("it does not answer, or is still starting")
        async with self._lock:
            if self._live is not None:
                folder, version, sums = self._live
                try:
                    if not await self._holds(member, version, sums):
                        await load(member.client, folder, version, sums, self._push_s)
                    member.version = version
                finally:
                    await self._release(member, abort=member.epoch > 0)  # what it still runs, nobody waits for
            member.serving, member.why = True, ""
            async with self._returned:
                self._returned.notify_all()

    # -- weights ------------------------------------------------------------------------------------------------------

    async def push(
        self, folder: str | os.PathLike, version: str | int, *, pause_s: float = 120.0, export_s: float = 0.0
    ) -> Push:
        """Makes `folder` the weights of every serving server, as `version`; all pause meanwhile, `pause_s` at most.

        The version becomes live when all that serve have loaded it, name it, and gave its checksums; requests go on
        only then. A server that failed is ejected; if all failed, the old version stays live, with the servers that
        still prove to hold it. Errors: CheckpointError, OSError or SamplerError before anything is paused, for a folder
        or a server that cannot be verified; SamplerError (with each server's reason) when no server took the weights;
        SamplerUnavailable when none serves.
        """
        version = str(version)
        await self.ready()
        async with self._lock:
            began = time.perf_counter()
            path = await asyncio.to_thread(self.folders.stage, folder, version)
            staged = time.perf_counter()
            sums = await asyncio.to_thread(FolderSums, path)
            nbytes = weight_bytes(path)
            for member in [member for member in self._members if member.serving]:
                try:
                    await prepare(member.client, sums, self._push_s)
                except (Lost, SamplerUnavailable) as error:
                    self._eject(member, str(error))
            members = [member for member in self._members if member.serving]
            if not members:
                raise SamplerUnavailable(f"no sampler could be prepared for version {version}: {self._absent()}")
            prepared = time.perf_counter()
            loads, failures = await self._load_all(members, path, version, sums, pause_s)
            paused = time.perf_counter() - prepared
            for member in self._members:
                if member.process is not None and loads:
                    member.process.checkpoint = Path(folder)
            self.folders.collect({version if loads else self.version or version})
        if not loads:
            raise SamplerError(f"no sampler took version {version}, {self.version} stays live: {'; '.join(failures)}")
        return Push(
            version=version,
            nbytes=nbytes,
            servers=tuple(m.client.url for m in self._members if m in loads),
            ejected=tuple(m.client.url for m in self._members if m not in loads),
            export_s=export_s,
            stage_s=staged - began if path != Path(folder).resolve() else 0.0,
            prepare_s=prepared - staged,
            load_s=max(loaded.load_s for loaded in loads.values()),
            verify_s=max(loaded.verify_s for loaded in loads.values()),
            pause_s=paused,
        )

    async def _load_all(
        self, members: list[_Member], path: Path, version: str, sums: FolderSums, pause_s: float
    ) -> tuple[dict[_Member, Loaded], list[str]]:
        loads: dict[_Member, Loaded] = {}
        failed: dict[_Member, str] = {}
        settled = False

        async def one(member: _Member) -> None:
            try:
                async with asyncio.timeout(pause_s):
                    loads[member] = await load(member.client, path, version, sums, pause_s)
            except (SamplerError, ValueError, OSError) as error:  # TimeoutError is an OSError
                failed[member] = f"{member.client.url}: {error or f'not done within {pause_s:g} s'}"

        for member in members:
            member.pushing = True
        try:
            await asyncio.gather(*(one(member) for member in members))
            if loads:
                self._live = path, version, sums
                self._history.append(version)
            for member in members:
                if member in loads:
                    member.version = version
                    member.prefixes.clear()
                elif loads or not await self._still_old(member):
                    self._eject(member, failed[member])
            settled = True
        finally:
            # Also when this task is cancelled: a server that nobody lets continue would hang its callers.
            for member in [] if settled else [member for member in members if member.serving]:
                self._eject(member, "the push to it was cancelled")
            went_on = await asyncio.gather(*(self._release(member, abort=not member.serving) for member in members))
            for member, goes_on in zip(members, went_on, strict=True):
                member.pushing = False
                if member.serving and not goes_on:
                    self._eject(member, "it did not continue after a push")
        return loads, list(failed.values())

    async def _holds(self, member: _Member, version: str, sums: FolderSums) -> bool:
        """Whether a server names the version and proves to hold it. Errors: Lost, SamplerUnavailable."""
        try:
            if (await member.client.model_info(CONTROL_S)).get("weight_version") != version:
                return False
            await prove(member.client, sums, self._push_s)
        except (Lost, SamplerUnavailable):
            raise
        except SamplerError:
            return False
        return True

    async def _still_old(self, member: _Member) -> bool:
        """Whether a server that refused new weights proves to hold the live ones."""
        if self._live is None:
            return False
        try:
            async with asyncio.timeout(CONTROL_S):
                return await self._holds(member, *self._live[1:])
        except (SamplerError, ValueError, OSError):
            return False

    async def _release(self, member: _Member, *, abort: bool) -> bool:
        """Lets a server continue; with `abort` it first ends what it runs. Whether it does."""
        for call in [*([member.client.abort] if abort else []), member.client.resume]:
            try:
                async with asyncio.timeout(CONTROL_S):
                    await call()
                done = True
            except (SamplerError, TimeoutError):
                done = False
        return done


def _chain(ids: Sequence[int]) -> list[int]:
    """One number per whole block, which stands for all tokens up to its end."""
    chain, last = [], 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        last = hash((last, *ids[start : start + BLOCK]))
        chain.append(last)
    return chain
