import shutil
import threading
import time

import pytest

from north_jax.envs import SandboxDied, SandboxPool, SandboxUnavailable, make_sandbox

if shutil.which("bwrap") is None:
    pytest.skip("bubblewrap is not installed: apt-get install bubblewrap", allow_module_level=True)


def test_many_threads_share_few_sandboxes():
    results, failures = [], []

    def episodes(pool, worker):
        for turn in range(5):
            with pool.lend() as sandbox:
                sandbox.reset({"who": f"{worker}.{turn}"})
                output = sandbox.run("sleep 0.01; cat who").output
                (results if output == f"{worker}.{turn}" else failures).append(output)

    with SandboxPool(make_sandbox, 2) as pool:
        threads = [threading.Thread(target=episodes, args=(pool, worker)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 30 and failures == []
        assert pool.starts == 2


def test_acquire_waits_and_gives_up():
    with SandboxPool(make_sandbox, 1) as pool:
        sandbox = pool.acquire()
        with pytest.raises(TimeoutError, match=r"all 1 are lent"):
            pool.acquire(timeout_s=0.05)
        threading.Timer(0.2, pool.release, (sandbox,)).start()
        began = time.monotonic()
        assert pool.acquire(timeout_s=10) is sandbox
        assert time.monotonic() - began > 0.1


def test_close_stops_lent_ones_and_wakes_those_who_wait():
    pool = SandboxPool(make_sandbox, 1)
    sandbox = pool.acquire()
    outcome = []

    def wait():
        try:
            pool.acquire()
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    threading.Timer(0.2, pool.close).start()
    with pytest.raises(SandboxDied):
        sandbox.run("sleep 20", timeout_s=20)
    thread.join(10)
    assert outcome == ["the sandbox pool is closed"]
    pool.release(sandbox)
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire()


def test_one_that_cannot_start_leaves_its_place_free(monkeypatch):
    with SandboxPool(make_sandbox, 1) as pool:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", "/nonexistent")
            with pytest.raises(SandboxUnavailable):
                pool.acquire()
        with pool.lend() as sandbox:
            assert sandbox.run("true").exit_code == 0
        assert pool.starts == 1


def test_size_is_checked():
    with pytest.raises(ValueError, match="at least one sandbox, not 0"):
        SandboxPool(make_sandbox, 0)
