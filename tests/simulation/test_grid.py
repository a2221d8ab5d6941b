"""The Grid on Ray: the same bits as in one process, and what becomes of errors, dead workers, late replies and states."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.clients import client_app
from flower_dp.simulation import RayGrid, placement
from flower_dp.simulation import grid as grid_module
from flower_dp.simulation.worker import Worker
from flower_dp.wire import KEY
from tests.adversaries.fuzzing import THOROUGH
from tests.contract_runs import SEED, SMALL, STILL, WatchedGrid, app_of, start, still_data, still_model
from tests.contracts import METHODS, Words
from tests.simulation.obedient import Broken, app_that, forging, obey, reported, to

pytestmark = pytest.mark.flwr_run
# Seconds in which no worker replies that waits.
STARTED = 0.1


def ask(grid, *nodes, **what):
    """Send a message to each node, and return what they report."""
    return [reported(reply) for reply in grid.send_and_receive([to(node, **what) for node in nodes])]


@pytest.fixture
def grid(workers):
    with RayGrid(app_that(obey), workers, num_nodes=4, run_config={"rounds": 3}) as made:
        yield made


def test_there_are_as_many_nodes_as_the_strategy_expects_clients(workers):
    """Where nobody has said how many: a stock client is a node."""
    for num_nodes, expected, there in ((None, (3, 5), 3), (None, (), 2), (4, (3,), 4)):  # without a strategy one a worker
        with RayGrid(app_that(obey), workers, num_nodes=num_nodes) as grid:
            for one in expected:
                grid.expect(one)
            assert list(grid.get_node_ids()) == list(range(2, 2 + there))
            (reply,) = grid.send_and_receive([to(3)])
            assert reported(reply)["parts"] == there


# With torch: the same run


def renumbered(grid):
    """A grid in this process whose nodes have the ids of a RayGrid's."""
    for node in sorted(grid.contexts, reverse=True):
        context = grid.contexts.pop(node)
        context.node_id = node + 1
        grid.contexts[node + 1] = context
    grid.contexts = dict(sorted(grid.contexts.items()))
    return grid


def on_nodes():
    """Every method with two clients on a node, or with one, in turn; with both if tests are thorough. A stock client is a node."""
    for place, method in enumerate(METHODS):
        both = [4] if method.client is None else [2, 4] if THOROUGH else [2 + 2 * (place % 2)]
        yield from (pytest.param(method, num_nodes, id=f"{method.label}-{num_nodes}") for num_nodes in both)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "num_nodes"), list(on_nodes()))
def test_every_method_releases_the_bits_of_the_grid_in_this_process(workers, method, num_nodes):
    arguments = Words(noise_seed=SEED)
    app = app_of(method, arguments, SMALL, num_nodes=num_nodes, noise_seed=SEED)
    local = start(method.strategy(arguments), renumbered(WatchedGrid(app, num_nodes)), arguments)
    with RayGrid(app, workers, num_nodes=num_nodes) as grid:
        ray = start(method.strategy(arguments), grid, arguments)
    assert len(set(local.bits)) == 4
    assert ray.bits == local.bits
    assert str(ray.strategy.statement) == str(local.strategy.statement)


# Noise


@pytest.mark.slow
def test_no_worker_repeats_noise(workers):
    """The same app and message: from two workers, from one of them again, and from one that has replaced another."""
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    arguments = Words(num_rounds=1)
    app = app_of(method, arguments, STILL, num_nodes=2)
    local = WatchedGrid(app, 2)
    start(method.strategy(arguments), local, arguments, STILL)
    (message, _) = local.train_messages
    rows = []

    def answer(grid, node):
        sent = Message(message.content, node, "train")
        (reply,) = grid.send_and_receive([sent])
        record = next(iter(reply.content.array_records.values()))
        rows.append(list(record.values())[-1].numpy().astype(np.float64))

    for again in range(2):
        with RayGrid(one_client(method, arguments), workers, num_nodes=2) as grid:
            for node in (2, 3, 2, 3):
                answer(grid, node)
        if not again:
            workers.replace(0)
    assert len(rows) == 8
    # 28 correlations, each beyond 6 standard deviations with probability 2e-9.
    assert np.abs(np.corrcoef(np.stack(rows)) - np.eye(8)).max() < 6 / np.sqrt(rows[0].size)
    assert all(row.std() > 0 for row in rows)


def one_client(method, arguments):
    """Every node hosts c0: a client made once, which is copied into every worker."""
    client = method.client(arguments, model=still_model(), clients={"c0": still_data("c0")}, noise_seed=None)
    return client_app(lambda context: client)


def test_a_node_has_its_own_settings_and_finds_the_folder(workers, tmp_path, monkeypatch):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arguments = {"folder": str(Path.cwd()), "threads": torch.get_num_threads(), **context.node_config, **context.run_config}
        return Message(RecordDict({"told": ConfigRecord(arguments)}), reply_to=message)

    monkeypatch.chdir(tmp_path)
    own = lambda part: {"nbafl.paper-epsilon": 2.0} if part else {}  # noqa: E731
    with RayGrid(app, workers, num_nodes=2, run_config={"method": "nbafl"}, node_config=own) as grid:
        one, other = map(reported, grid.send_and_receive([to(2), to(3)]))
    both = {"num-partitions": 2, "method": "nbafl", "folder": str(tmp_path), "threads": 1}
    assert one == both | {"partition-id": 0}
    assert other == both | {"partition-id": 1, "nbafl.paper-epsilon": 2.0}


# Errors


def test_what_an_app_raises_is_an_error_reply_and_leaves_the_state_as_it_was(grid, caplog):
    first, raised, ended, nothing, last = grid.send_and_receive(
        [to(3), to(3, do="raise", what="data"), to(3, do="exit"), to(3, do="return nothing"), to(3)]
    )
    assert (reported(first)["count"], reported(last)["count"]) == (1, 2)
    assert reported(first)["process"] == reported(last)["process"]
    assert [(reply.error.code, reply.error.reason) for reply in (raised, ended, nothing)] == [
        (2, "no data"),
        (2, "the app ends its process"),
        (2, "the ClientApp returned a NoneType: must be a Message"),
    ]
    assert "ValueError: no data" in caplog.text


def test_the_nodes_are_flowers(grid):
    assert list(grid.get_node_ids()) == [2, 3, 4, 5]
    *replies, strange = grid.send_and_receive([to(node) for node in (5, 2, 4, 3, 77)])
    assert [(reported(reply)["node"], reported(reply)["part"]) for reply in replies] == [(5, 3), (2, 0), (4, 2), (3, 1)]
    assert len({reply.metadata.message_id for reply in replies}) == 4
    assert (strange.error.code, strange.error.reason) == (5, "node 77 is not one of this run")


@pytest.mark.parametrize("error", ["RayActorError", "OutOfMemoryError"])
def test_a_dead_worker_costs_its_message_and_comes_back_with_the_state(grid, error, monkeypatch, caplog):
    """Also where its machine was low on memory, which is another error."""
    known, get = grid._ray.exceptions, grid._ray.get

    def told(ref):
        try:
            return get(ref)
        except known.RayActorError:
            raise getattr(known, error)("Task was killed\ndue to the node running low on memory.") from None

    monkeypatch.setattr(grid._ray, "get", told)
    deadly = to(2, do="die")
    deadly.content["told"] = ConfigRecord({KEY: '{"clients": ["c0", "c4"]}'})
    ask(grid, 2, 3, 4, 5)
    before = {answer["process"] for answer in ask(grid, 2, 3)}
    dead, alive = grid.send_and_receive([deadly, to(3)])
    assert f"A worker died while it served node 2 (clients c0, c4): {error}" in caplog.text
    assert (dead.error.code, dead.error.reason) == (8, "ClientApp stopped responding.")
    assert (dead.metadata.src_node_id, reported(alive)["count"]) == (2, 3)
    after = ask(grid, 2, 3, 4, 5)
    assert [answer["count"] for answer in after] == [3, 4, 2, 2]
    assert len({answer["process"] for answer in after} - before) == 1


def test_a_worker_that_hangs_says_where_and_is_replaced(grid, workers, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(grid_module, "_PATIENCE_SECONDS", 2.0)
    never = str(tmp_path / "never")
    hung = to(2, do="wait", until=never)
    processes = {answer["process"] for answer in ask(grid, 2, 3, 4, 5)}
    late = grid.send_and_receive([hung, to(4, do="wait", until=never)], timeout=0.5)
    assert late == []
    deadline = time.monotonic() + 60
    while len(replies := grid.send_and_receive([to(node) for node in (2, 3, 4, 5)], timeout=10.0)) < 4:
        assert time.monotonic() < deadline
    assert len({reported(reply)["process"] for reply in replies} & processes) < len(processes)
    assert "A worker died while it served node 2" in caplog.text
    folder = Path(workers._ray._private.worker._global_node.get_logs_dir_path())
    assert any("obedient.py" in file.read_text(errors="replace") for file in folder.glob("worker-*.err"))


def test_a_worker_that_can_not_end_itself_is_ended(grid, monkeypatch, caplog):
    """It is stopped: no thread of its own runs."""
    monkeypatch.setattr(grid_module, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(grid_module, "_GRACE_SECONDS", 0.5)
    stopped = reported(next(iter(grid.send_and_receive([to(2)]))))["process"]
    os.kill(stopped, signal.SIGSTOP)
    assert grid.send_and_receive([to(2)], timeout=0.1) == []
    for _ in range(6):
        if replies := [reply for reply in grid.send_and_receive([to(2)], timeout=3.0) if not reply.has_error()]:
            break
    assert len(replies) == 1
    assert reported(replies[0])["process"] != stopped
    assert "A worker died while it served node 2: it does not respond" in caplog.text


# Workers that find no machine


@contextmanager
def made_instead(workers, worker=Worker, num_cpus=1):
    """Replace workers by others; in the end those that are there are as before."""
    import ray

    before, actors = workers._make, list(workers.actors)
    workers._make = ray.remote(worker).options(num_cpus=num_cpus)
    try:
        yield
    finally:
        workers._make = before
        for index, actor in enumerate(actors):
            if workers.actors[index] is not actor:
                workers.replace(index)


def test_a_worker_that_finds_no_machine_leaves_its_nodes_to_the_others_until_none_is_left(workers, grid, monkeypatch):
    monkeypatch.setattr(placement, "_START_SECONDS", 1.0)
    before = ask(grid, 2, 3, 4, 5)
    with made_instead(workers, num_cpus=1_000):
        dead, *others = grid.send_and_receive([to(2, do="die"), to(3), to(4), to(5)])
        assert dead.error.code == 8
        after = ask(grid, 2, 3, 4, 5)
        assert len({answer["process"] for answer in [*map(reported, others), *after]}) == 1
        assert {answer["process"] for answer in after} < {answer["process"] for answer in before}
        # The state of the nodes that have moved came along.
        assert [answer["count"] for answer in after] == [2, 3, 3, 3]
        # The last one dies too.
        monkeypatch.setattr(placement, "_NOBODY_SECONDS", 0.5)
        (dead,) = grid.send_and_receive([to(2, do="die")])
        assert dead.error.code == 8
        with pytest.raises(RuntimeError, match=r"no worker is left: .*no machine has had room for one"):
            grid.send_and_receive([to(2)])


def test_a_run_without_workers_ends(workers, grid, caplog):
    ask(grid, 2, 3)
    with made_instead(workers, Broken):
        replies = grid.send_and_receive([to(2, do="die"), to(3, do="die")])
        assert [reply.error.code for reply in replies] == [8, 8]
        with pytest.raises(RuntimeError, match=r"no worker is left: .*all have died, and none could be started again"):
            grid.send_and_receive([to(2)])
    # Each of the two is started three times: a process that is killed while it starts says nothing of the next.
    assert caplog.text.count("A worker could not start") == 6


def test_ray_listens_to_this_machine_alone(workers):
    """Whoever reaches one of its ports may run anything."""
    at = set()
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray's workers start short commands
            at |= {place.laddr for place in one.net_connections("tcp") if place.status == psutil.CONN_LISTEN}
    assert len(at) > 3
    assert [place for place in at if not place.ip.endswith("127.0.0.1")] == []


def test_a_reply_in_the_name_of_another_is_an_error_of_its_own_node(workers):
    app = ClientApp()
    app.train()(forging)
    with RayGrid(app, workers, num_nodes=4) as grid:
        replies = list(grid.send_and_receive([to(2, forge="node"), to(3, forge="number")]))
    assert [(reply.metadata.src_node_id, reply.error.code) for reply in replies] == [(2, 8), (3, 8)]


# Time


def test_the_state_that_a_late_reply_has_left_survives_its_worker(grid, tmp_path):
    ask(grid, 2)
    assert list(grid.send_and_receive([to(2, do="wait", until=str(tmp_path / "on"))], timeout=STARTED)) == []
    (tmp_path / "on").touch()
    (dead,) = grid.send_and_receive([to(2, do="die")])
    (after,) = grid.send_and_receive([to(2)])
    assert (dead.error.code, reported(after)["count"]) == (8, 3)


def test_a_node_serves_one_message_after_the_other(grid):
    """Two at once would charge the same account twice, and count it once."""
    ask(grid, 2, 3)
    replies = grid.send_and_receive([to(2, do="sleep", seconds=0.5), to(2), to(2)])
    assert [reported(reply)["count"] for reply in replies] == [2, 3, 4]


def test_what_no_worker_had_when_the_time_was_over_is_not_sent(grid, tmp_path):
    ask(grid, 2, 3, 4, 5)
    slow = [to(node, do="wait", until=str(tmp_path / "on")) for node in (2, 3)]
    assert list(grid.send_and_receive([*slow, to(4), to(5)], timeout=STARTED)) == []
    (tmp_path / "on").touch()
    assert [answer["count"] for answer in ask(grid, 4, 5)] == [2, 2]


def test_a_worker_that_is_done_helps_the_other(grid, tmp_path):
    ask(grid, 2, 3, 4, 5)
    # Nodes 2 and 4 belong to the first worker. While it works for 2, the other takes 4, with its state.
    until = str(tmp_path / "on")
    slow, stolen = grid.send_and_receive([to(2, do="wait", until=until), to(4, do="touch", what=until)])
    assert reported(slow)["process"] != reported(stolen)["process"]
    assert (reported(stolen)["count"], reported(slow)["count"]) == (2, 2)
    assert [answer["count"] for answer in ask(grid, 4, 4)] == [3, 4]


def test_a_grid_leaves_no_work_behind(workers):
    with RayGrid(app_that(obey), workers, num_nodes=2) as grid:
        assert list(grid.send_and_receive([to(2, do="sleep", seconds=600)], timeout=0.2)) == []
    with RayGrid(app_that(obey), workers, num_nodes=2) as grid:
        assert [answer["count"] for answer in ask(grid, 2, 3)] == [1, 1]


def test_threads_may_share_a_grid(grid):
    """Flower's old server API sends every message from a thread of its own."""
    ask(grid, 2, 3, 4, 5)
    with ThreadPoolExecutor(8) as pool:
        asked = [2 + number % 4 for number in range(40)]
        replies = [one for (one,) in pool.map(lambda node: list(grid.send_and_receive([to(node)])), asked)]
    assert [reply.metadata.src_node_id for reply in replies] == asked
    assert sorted((reply.metadata.src_node_id, reported(reply)["count"]) for reply in replies) == [
        (node, count) for node in (2, 3, 4, 5) for count in range(2, 12)
    ]
