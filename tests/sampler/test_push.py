"""Weights proved in the memory of real servers, and the folders they come from."""

import asyncio

import numpy as np
import pytest

from north_jax.sampler import push
from north_jax.sampler.answer import SamplerError
from north_jax.sampler.checksums import FolderSums, _layouts, cuda_hash
from north_jax.sampler.client import SamplerClient
from north_jax.weights import hf

VOCAB, CONTEXT = 97, 120


def client_of(server):
    return SamplerClient(server.url, vocab_size=VOCAB, context=CONTEXT, timeout_s=60.0)


def test_a_server_is_proved_tensor_by_tensor(servers, versions):
    async def run():
        async with client_of(servers[0]) as client:
            await push.prove(client, FolderSums(versions / "v0"), 60)
            with pytest.raises(SamplerError, match=r"does not hold the weights of .*v1: tensor .* differs"):
                await push.prove(client, FolderSums(versions / "v1"), 60)
            # A name is no proof: these are the weights of v1 under the name v0.
            await client.update_weights(versions / "v1", "v0")
            with pytest.raises(SamplerError, match=r"does not hold the weights of .*v0: tensor .* differs"):
                await push.prove(client, FolderSums(versions / "v0"), 60)
            await push.prove(client, FolderSums(versions / "v1"), 60)

    asyncio.run(run())


def test_load_leaves_the_server_paused_and_proved(servers, versions):
    async def run():
        async with client_of(servers[0]) as client:
            loaded = await push.load(client, versions / "v2", "two", FolderSums(versions / "v2"), 60)
            assert (await client.model_info())["weight_version"] == "two"
            waiting = asyncio.create_task(client.generate([5, 6], temperature=0.0, max_new_tokens=3))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await client.resume()
            return loaded, await waiting

    loaded, result = asyncio.run(run())
    assert loaded.load_s > 0
    assert loaded.verify_s > 0
    assert {version for *_, version in result.versions} == {"two"}


def test_a_single_changed_weight_is_seen(servers, versions, make_model, tmp_path):
    model = make_model(0)
    expert = model.layers[2].mlp.up_EDF
    expert[...] = expert[...].at[3, 5, 7].add(1e-6)
    hf.save(tmp_path / "odd", model, version="v0", step=0)

    async def run():
        async with client_of(servers[0]) as client:
            with pytest.raises(SamplerError, match=r"tensor model\.layers\.2\.mlp\.experts\..* differs"):
                await push.prove(client, FolderSums(tmp_path / "odd"), 60)

    asyncio.run(run())


def test_ranks_of_tensor_parallelism_hold_the_whole_between_them(tiny_config):
    rng = np.random.default_rng(0)
    heads, groups, size, hidden, inner = 4, 2, 8, 32, 16
    q, k, v = (rng.normal(size=(rows * size, hidden)).astype("f4") for rows in (heads, groups, groups))
    for ranks in (2, 4):
        layouts = [_layouts("x.qkv_proj.weight", [[q, k, v]], rank, ranks, tiny_config, False) for rank in range(ranks)]
        parts = [min(each, key=len) for each in layouts]  # the other is the whole, which a rank might hold instead
        each = heads // ranks * size
        np.testing.assert_array_equal(np.concatenate([part[:each] for part in parts]), q)
        # With more ranks than key heads some ranks have the same one.
        np.testing.assert_array_equal(parts[-1][each : each + size], k[-size:])
        np.testing.assert_array_equal(parts[-1][-size:], v[-size:])
    rows = [[rng.normal(size=(inner, hidden)).astype("f4") for _ in range(2)] for _ in range(4)]
    halves = [list(_layouts("x.experts.w13_weight", rows, r, 2, tiny_config, False)) for r in range(2)]
    shape = (4, inner, hidden)
    first, second = (next(h for h in half if h.shape == shape) for half in halves)
    np.testing.assert_array_equal(first[1, : inner // 2], rows[1][0][: inner // 2])
    np.testing.assert_array_equal(second[1, inner // 2 :], rows[1][1][inner // 2 :])


def test_the_cuda_hash_is_sglangs():
    # Of the same bytes by the kernel of SGLang 0.5.23 itself, in Triton's interpreter.
    kernel = {
        3: "64dd2c30b3087344",
        32768: "e84b882314b17e50",
        32774: "57cfb49ccbdecf84",
        163850: "7b03c6a29e1c5fbe",
    }
    for size, wanted in kernel.items():
        value = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        assert cuda_hash(value) == wanted
        value[size // 2] ^= 1
        assert cuda_hash(value) != wanted


def export(root, name):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(name.encode())
    return folder


def test_folders_are_staged_and_removed_after_their_last_reader(tmp_path):
    root, ram = tmp_path / "weights", tmp_path / "ram"
    folders = push.WeightFolders(root, ram)
    ram.mkdir()
    for name in ("v1", "v2"):
        staged = folders.stage(export(root, name), name)
        assert staged == ram / name
        assert (staged / "model.safetensors").read_bytes() == name.encode()
    with folders.lease("v1") as leased:
        folders.stage(export(root, "v3"), "v3")
        assert leased == root / "v1"
        assert folders.collect({"v2"}) == []  # v1 is leased, v2 served, v3 the newest
        assert folders.collect(set()) == ["v2"]
        assert sorted(p.name for p in root.iterdir()) == sorted(p.name for p in ram.iterdir()) == ["v1", "v3"]
    assert folders.collect(set()) == ["v1"]
    assert [p.name for p in root.iterdir()] == [p.name for p in ram.iterdir()] == ["v3"]
    with pytest.raises(KeyError, match="version v1 is not kept"), folders.lease("v1"):
        pass


def test_a_folder_that_is_not_the_runs_own_is_never_removed(tmp_path):
    folders = push.WeightFolders(tmp_path / "weights")
    foreign = export(tmp_path / "elsewhere", "released")
    folders.stage(foreign, "0")
    folders.stage(export(tmp_path / "weights", "v1"), "1")
    assert folders.collect({"1"}) == ["0"]
    assert foreign.exists()


def test_a_ram_disk_without_room_is_one_sentence(tmp_path):
    (tmp_path / "ram").write_text("no directory")
    folders = push.WeightFolders(tmp_path / "weights", tmp_path / "ram")
    with pytest.raises(OSError, match=r"v1 could not be staged in .*ram .*free memory there"):
        folders.stage(export(tmp_path / "weights", "v1"), "1")
