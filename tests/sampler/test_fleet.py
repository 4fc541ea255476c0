"""Many servers behind one interface: real processes, killed, frozen, and given wrong weights."""

import asyncio
import contextlib
import os
import signal

import pytest

from north_jax.sampler import fleet as fleets
from north_jax.sampler.answer import Generation, SamplerError, SamplerUnavailable
from north_jax.sampler.client import SamplerClient
from north_jax.sampler.fleet import SamplerFleet
from north_jax.sampler.push import WeightFolders
from north_jax.weights.folder import CheckpointError

VOCAB, CONTEXT = 97, 120
PROMPTS = [[start, 5] for start in range(4, 28)]


@contextlib.asynccontextmanager
async def fleet_of(servers, versions, **changes):
    about = {"folder": versions / "v0", "version": "v0", "vocab_size": VOCAB, "context": CONTEXT, "timeout_s": 120.0}
    async with SamplerFleet(servers, **about | {"health_s": 0.1} | changes) as fleet:
        await fleet.ready(len(servers), 120)
        yield fleet


def member_of(fleet, server):
    return next(member for member in fleet._members if member.client.url == server.url)


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def kill(server):
    """What `kill -9` of every process of the server does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


async def start(fleet, prompts=PROMPTS, **how):
    """Requests that are being answered."""
    how = {"temperature": 1.0, "max_new_tokens": 100} | how
    tasks = [asyncio.create_task(fleet.generate(prompt, **how)) for prompt in prompts]
    await until(lambda: sum(member.open for member in fleet._members) > 0)
    return tasks


async def expected_of(url, prompts, version):
    """Greedy completions by one server whose version is known."""
    async with SamplerClient(url, vocab_size=VOCAB, context=CONTEXT) as client:
        assert (await client.model_info())["weight_version"] == version
        return [(await client.generate(p, temperature=0.0, max_new_tokens=20)).ids for p in prompts]


def check_spans(results, order):
    """Every answer has versions in the order they went live, covering all of its tokens."""
    for result in results:
        names = [version for *_, version in result.versions]
        assert names == sorted(names, key=order.index), result.versions
        assert sum(end - start for start, end, _ in result.versions) == len(result.ids)


# --- choice ---


@pytest.fixture
def idle():
    fleet = SamplerFleet(["http://a", "http://b", "http://c"], vocab_size=VOCAB, context=4096)
    fleet._members = [
        fleets._Member(SamplerClient(url, vocab_size=VOCAB, context=4096), None, serving=True) for url in fleet._servers
    ]
    return fleet


def test_a_group_and_a_conversation_stay_where_their_prefix_is(idle):
    prompt = list(range(90)) * 3
    other = [1, *prompt]
    first = idle._choose(fleets._chain(prompt))
    first.remember(fleets._chain(prompt))
    first.open += 3  # busy, but not clearly busier
    assert idle._choose(fleets._chain(prompt)) is first
    assert idle._choose(fleets._chain([*prompt, *range(80)])) is first  # the next turn
    assert idle._choose(fleets._chain(other)) is not first
    assert idle._choose(fleets._chain(prompt[:50])) is not first  # less than a block is no prefix
    first.open += 2
    assert idle._choose(fleets._chain(prompt)) is not first


def test_the_longest_prefix_wins_and_then_the_least_loaded(idle):
    a, b, c = idle._members
    system = list(range(64))
    for member in idle._members:
        member.remember(fleets._chain(system))
    b.remember(fleets._chain(system + [7] * 64))
    a.open, b.open, c.open = 2, 3, 1
    assert idle._choose(fleets._chain(system + [7] * 64)) is b
    assert idle._choose(fleets._chain(system + [8] * 64)) is c
    b.serving = False
    assert idle._choose(fleets._chain(system + [7] * 64)) is c
    a.serving = c.serving = False
    assert idle._choose(fleets._chain(system)) is None


def test_what_is_remembered_is_bounded(idle, monkeypatch):
    monkeypatch.setattr(fleets, "REMEMBERED", 3)
    member = idle._members[0]
    for token in range(5):
        member.remember(fleets._chain([token] * 64))
    assert len(member.prefixes) == 3
    assert member.shared(fleets._chain([0] * 64)) == 0
    assert member.shared(fleets._chain([4] * 64)) == 1


# --- real servers ---


def test_two_servers_share_the_work_and_stream(servers, versions):
    async def run():
        async with fleet_of(servers, versions) as fleet:
            tasks = await start(fleet, temperature=0.0, max_new_tokens=20)
            loads = [member.open for member in fleet._members]
            results = [result.ids for result in await asyncio.gather(*tasks)]
            *_, last = [item async for item in fleet.stream(PROMPTS[0], temperature=0.0, max_new_tokens=20)]
            return loads, results, last, await expected_of(servers[1].url, PROMPTS, "v0")

    loads, results, last, expected = asyncio.run(run())
    assert min(loads) >= 8
    assert results == expected
    assert isinstance(last, Generation)
    assert last.ids == expected[0]


def test_a_push_while_requests_run(servers, versions, tmp_path):
    ram = tmp_path / "ram"
    ram.mkdir()

    async def run():
        folders = WeightFolders(ram=ram)
        async with fleet_of(servers, versions, folders=folders) as fleet:
            pushed, results, done = [], [], False

            async def ask_again_and_again(prompt):
                while not done:
                    results.append(await fleet.generate(prompt, temperature=1.0, max_new_tokens=100))

            tasks = [asyncio.create_task(ask_again_and_again(prompt)) for prompt in PROMPTS]
            for version in ("v1", "v2"):
                enough = len(results) + 20
                await until(lambda enough=enough: len(results) > enough)
                pushed.append(await fleet.push(versions / version, version, export_s=0.5))
                assert fleet.version == version
            done = True
            await asyncio.gather(*tasks)
            after = await fleet.generate([5, 6], temperature=0.0, max_new_tokens=5)
            expected = await expected_of(servers[0].url, [[5, 6]], "v2")
            return pushed, results, after, expected, fleet.status()

    pushed, results, after, expected, status = asyncio.run(run())
    check_spans(results, ["v0", "v1", "v2"])
    assert any(len(result.versions) > 1 for result in results)
    assert after.versions == [(0, len(after.ids), "v2")]
    assert after.ids == expected[0][:5]
    assert all(member["serving"] and member["version"] == "v2" for member in status)
    assert [path.name for path in ram.iterdir()] == ["v2"]
    for push in pushed:
        assert push.export_s == 0.5
        assert min(push.stage_s, push.load_s, push.verify_s, push.gb_per_s) > 0
        assert max(push.load_s, push.verify_s) <= push.pause_s < 60  # the slowest of each, perhaps of two servers
        assert push.nbytes == (versions / "v1" / "model.safetensors").stat().st_size
        assert push.servers == tuple(server.url for server in servers)
        assert push.ejected == ()


def test_kill_in_mid_generation(servers, versions):
    """The requests end on the other server; the killed one starts with old weights and gets the live ones first."""

    async def run():
        async with fleet_of(servers, versions) as fleet:
            await fleet.push(versions / "v1", "v1")
            tasks = await start(fleet)
            servers[0].checkpoint = versions / "v0"
            starts = servers[0].starts
            kill(servers[0])
            await until(lambda: not member_of(fleet, servers[0]).serving)
            results = await asyncio.gather(*tasks)
            await fleet.ready(2, 120)
            assert servers[0].starts == starts + 1
            greedy = [await fleet.generate(p, temperature=0.0, max_new_tokens=20) for p in PROMPTS]
            one, two = [await expected_of(server.url, PROMPTS, "v1") for server in servers]
            return results, [result.ids for result in greedy], one, two

    results, greedy, one, two = asyncio.run(run())
    assert all(result.versions == [(0, len(result.ids), "v1")] for result in results)
    assert greedy == one == two


def test_kill_in_mid_update(servers, versions):
    async def run():
        async with fleet_of(servers, versions) as fleet:
            tasks = await start(fleet)
            client = member_of(fleet, servers[0]).client
            update = client.update_weights

            async def update_and_die(*args, **kwargs):
                os.killpg(servers[0].pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.3, kill, servers[0])  # it has the request by then
                await update(*args, **kwargs)

            client.update_weights = update_and_die
            pushed = await fleet.push(versions / "v1", "v1", pause_s=60)
            del client.update_weights
            results = await asyncio.gather(*tasks)
            await fleet.ready(2, 120)
            one, two = [await expected_of(server.url, PROMPTS[:4], "v1") for server in servers]
            return pushed, results, one, two

    pushed, results, one, two = asyncio.run(run())
    assert pushed.servers == (servers[1].url,)
    assert pushed.ejected == (servers[0].url,)
    assert pushed.pause_s < 30  # the other did not wait for the deadline
    check_spans(results, ["v0", "v1"])
    assert one == two


def test_a_server_with_other_weights_is_found_out(servers, versions):
    """Somebody loads other weights into one server behind our back."""

    async def run():
        async with fleet_of(servers, versions) as fleet:
            expected = await expected_of(servers[1].url, PROMPTS, "v0")
            async with SamplerClient(servers[0].url, vocab_size=VOCAB, context=CONTEXT) as stranger:
                await stranger.update_weights(versions / "v2", "v2")
            results = await asyncio.gather(*(fleet.generate(p, temperature=0.0, max_new_tokens=20) for p in PROMPTS))
            await fleet.ready(2, 60)
            return expected, results, await expected_of(servers[0].url, PROMPTS, "v0")

    expected, results, healed = asyncio.run(run())
    assert [result.ids for result in results] == expected == healed
    assert all(result.versions == [(0, len(result.ids), "v0")] for result in results)


def test_a_push_that_fails_verification_ejects_the_server(servers, versions):
    """One server loads v2 under the name of v1: its answers are never used, and it comes back with v1."""

    async def run():
        async with fleet_of(servers, versions) as fleet:
            tasks = await start(fleet)
            client = member_of(fleet, servers[0]).client
            update = client.update_weights

            async def update_wrongly(path, version, **kwargs):
                await update(versions / "v2", version, **kwargs)

            client.update_weights = update_wrongly
            pushed = await fleet.push(versions / "v1", "v1")
            del client.update_weights
            greedy = [await fleet.generate(p, temperature=0.0, max_new_tokens=20) for p in PROMPTS[:6]]
            results = await asyncio.gather(*tasks)
            await fleet.ready(2, 60)
            one, two = [await expected_of(server.url, PROMPTS[:6], "v1") for server in servers]
            return pushed, [result.ids for result in greedy], results, one, two

    pushed, greedy, results, one, two = asyncio.run(run())
    assert pushed.servers == (servers[1].url,)
    assert greedy == one == two
    check_spans(results, ["v0", "v1"])


def test_a_push_that_all_refuse_leaves_the_old_version_live(servers, versions, tmp_path, make_model):
    async def run():
        async with fleet_of(servers, versions) as fleet:
            tasks = await start(fleet)
            for member in fleet._members:
                update = member.client.update_weights

                async def nowhere(path, version, update=update, **kwargs):
                    await update(tmp_path / "nowhere", version, **kwargs)

                member.client.update_weights = nowhere
            with pytest.raises(SamplerError, match=r"no sampler took version v1, v0 stays live: .*400.*400"):
                await fleet.push(versions / "v1", "v1")
            assert fleet.version == "v0"
            assert all(member.serving for member in fleet._members)
            results = await asyncio.gather(*tasks)
            with pytest.raises(CheckpointError, match="does not exist"):  # before any server is asked
                await fleet.push(tmp_path / "v1", "v1")
            return results

    for result in asyncio.run(run()):
        assert result.versions == [(0, len(result.ids), "v0")]


def test_a_frozen_server_is_ejected_and_returns(servers, versions, monkeypatch):
    monkeypatch.setattr(SamplerClient, "HEALTH_S", 0.5)

    async def run():
        async with fleet_of(servers, versions) as fleet:
            tasks = await start(fleet, temperature=0.0, max_new_tokens=20)
            os.killpg(servers[0].pid, signal.SIGSTOP)
            try:
                results = await asyncio.gather(*tasks)
                await until(lambda: not member_of(fleet, servers[0]).serving)
                assert member_of(fleet, servers[0]).epoch == 1
            finally:
                os.killpg(servers[0].pid, signal.SIGCONT)
            await fleet.ready(2, 60)
            return [r.ids for r in results], await expected_of(servers[0].url, PROMPTS, "v0")

    results, expected = asyncio.run(run())
    assert results == expected


def test_no_server_at_all_is_one_sentence(versions):
    async def run():
        about = {"vocab_size": VOCAB, "context": CONTEXT, "timeout_s": 1.0, "health_s": 0.1}
        async with SamplerFleet(["http://127.0.0.1:9"], **about) as fleet:
            with pytest.raises(SamplerUnavailable, match=r"no answer within 1 s .*") as error:
                await fleet.generate([5], temperature=1.0, max_new_tokens=4)
            assert "http://127.0.0.1:9: it does not answer, or is still starting" in str(error.value)
            with pytest.raises(SamplerUnavailable, match="not 1 of 1 samplers serve after 1 s"):
                await fleet.push(versions / "v1", "v1")

    asyncio.run(run())


def test_a_cancelled_push_leaves_one_version_everywhere(servers, versions):
    async def run():
        async with fleet_of(servers, versions) as fleet:
            for member in fleet._members:
                update = member.client.update_weights

                async def slowly(path, version, update=update, **kwargs):
                    await update(path, version, **kwargs)
                    await asyncio.sleep(60)

                member.client.update_weights = slowly
            push = asyncio.create_task(fleet.push(versions / "v1", "v1"))
            await until(lambda: any(member.pushing for member in fleet._members))
            await asyncio.sleep(1.0)
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            for member in fleet._members:
                del member.client.update_weights
            assert push.cancelled()
            results = await asyncio.gather(*(fleet.generate(p, temperature=0.0, max_new_tokens=20) for p in PROMPTS))
            await fleet.ready(2, 60)
            return results, await expected_of(servers[0].url, PROMPTS, "v0")

    results, expected = asyncio.run(run())
    assert [result.ids for result in results] == expected
    assert all(result.versions == [(0, len(result.ids), "v0")] for result in results)
