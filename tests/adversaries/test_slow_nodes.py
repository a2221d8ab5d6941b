"""Devices that answer late, never, or with a reply that they do not upload: every wait of the server ends at its deadline."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable import inflatable_utils  # noqa: TID251

from flower_dp import wire
from flower_dp.clients import model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.exchange.stream import Replies
from flower_dp.strategies.population import grid_replies
from flower_dp.strategies.population.client_manager import ClientManager
from tests.grids import LocalGrid, asks_to_train
from tests.http_grids import LocalHttpGrid
from tests.local_grids import linear, shared_noise_app
from tests.stock import shifted, stock_app

NEVER = float("inf")
DIED = Error(code=8, reason="ClientApp stopped responding.")
NO_QUERIES = Error(code=2, reason="No query function registered")


def strategy(num_clients, **arguments):
    words = {"clip_norm": 0.5, "noise_multiplier": 1e-9, "sampling": FullSampling(), "delta": 1e-3, "registration_timeout": 60.0}
    return DPFedAvg(num_clients=num_clients, **words | arguments)


class Slow(LocalGrid):
    """Nodes whose answer to a question arrives so many seconds later, on the strategy's clock; some answer with an error."""

    def __init__(self, clock, delays, *, errors=None, app=None):
        super().__init__(app or shared_noise_app(), 0)
        self.clock, self.delays, self.errors, self.arrives = clock, delays, errors or {}, {}
        for node in delays:
            self.contexts[node] = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        for reply in replies:
            if error := self.errors.get(reply.metadata.src_node_id):
                vars(reply)["_content"], vars(reply)["_error"] = None, error
        return replies

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        for message, number in zip(messages, ids, strict=True):
            self.arrives[number] = self.clock.now + self.delays[message.metadata.dst_node_id]
        return ids

    def pull_messages(self, message_ids):
        return super().pull_messages([number for number in message_ids if self.arrives[number] <= self.clock.now])


def start(grid, num_clients):
    """Run a round; return how many clients have replied."""
    made = strategy(num_clients)
    made.start(grid, model_arrays(linear()), num_rounds=1)
    return made.rounds[0].replies


@pytest.mark.parametrize(("num_nodes", "num_silent"), [(2, 1), (4, 3), (30, 3), (100, 1)])
def test_silent_nodes_end_no_start(num_nodes, num_silent, clock):
    """The first nodes are asked what the app is."""
    grid, begun = Slow(clock, {node: NEVER if node < num_silent else 0.2 for node in range(num_nodes)}), clock.now
    assert start(grid, num_nodes - num_silent) == num_nodes - num_silent
    assert clock.now - begun < 30


@pytest.mark.parametrize("num_nodes", [4, 30])
def test_answers_after_some_seconds_end_no_start(num_nodes, clock):
    delays = dict(enumerate(np.random.default_rng(num_nodes).uniform(3, 15, num_nodes), 1))
    assert start(Slow(clock, delays), num_nodes) == num_nodes


def test_a_node_that_is_quicker_than_all_others_does_not_decide_that_the_app_is_a_stock_one(clock):
    """A stock client has no name, no policy and no budget."""
    grid = Slow(clock, {0: 0.0, **dict.fromkeys(range(1, 6), 8.0)}, errors={0: NO_QUERIES})
    start(grid, 5)
    asked = [wire.instruction_of(one.content["config"]).clients for one in grid.sent if asks_to_train(one)]
    assert sorted(asked) == [(f"c{node}",) for node in range(1, 6)]


def test_stock_clients_beside_one_that_is_silent_begin(clock):
    app = stock_app(shifted(lambda node: 1.0))
    begun = clock.now
    known = ClientManager(1, timeout=60.0, newcomers=True).known_clients(Slow(clock, {1: NEVER, 2: 0.0}, app=app))
    assert (known.hosting, clock.now - begun < 40) == (False, True)


def test_votes_that_arrive_in_a_later_round_do_not_change_what_the_app_is(clock):
    """Two nodes that lie, slowly, after one honest answer."""
    grid = Slow(clock, {1: 0.0, 2: 12.0, 3: 12.0, 4: 0.0, 5: 0.0}, errors={2: NO_QUERIES, 3: NO_QUERIES})
    manager = ClientManager(3, timeout=60.0, newcomers=True)
    first = manager.known_clients(grid)
    for _ in range(12):
        clock.sleep(5.0)
        later = manager.known_clients(grid)
    assert (first.names, first.hosting) == (later.names, later.hosting) == (("c1", "c4", "c5"), True)


def test_silent_nodes_are_named_where_too_few_are_there(clock):
    grid = Slow(clock, {1: NEVER, 2: 0.0})
    with pytest.raises(TimeoutError, match=r"only 1 clients on 1 nodes after 60 s; 1 do not answer: node 1"):
        start(grid, 2)


@pytest.mark.parametrize(
    ("delays", "errors", "error", "told", "seconds"),
    [
        ({1: NEVER, 2: 0.0, 3: 0.0}, {}, TimeoutError, r"only 2 clients.*do not answer: node 1", 62),
        ({1: NEVER, 2: NEVER, 3: 0.0}, {}, TimeoutError, r"only 1 clients.*do not answer: node 1", 62),
        ({1: 0.0, 2: 0.0, 3: 0.0}, {2: DIED}, ValueError, r"the simulation has 2 clients.*ClientApp stopped responding", 15),
    ],
)
def test_a_simulated_node_that_hangs_or_fails_again_and_again_ends_the_start(delays, errors, error, told, seconds, clock):
    grid, begun = Slow(clock, delays, errors=errors), clock.now
    grid.simulated = True
    with pytest.raises(error, match=told):
        start(grid, 3)
    assert clock.now - begun < seconds


def test_a_simulated_node_whose_process_dies_long_after_the_others_have_answered_is_asked_again(clock):
    """It is as where a worker hangs in the first query, and is replaced when half of the time is over."""

    class Dies(Slow):
        patience = None

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            if any(reply.metadata.src_node_id == 4 for reply in replies):
                self.errors = {}  # the next time it can
            return replies

    grid = Dies(clock, {1: 0.0, 2: 0.0, 3: 0.0, 4: 20.0}, errors={4: DIED})
    grid.simulated = True
    assert start(grid, 4) == 4
    assert grid.patience == 30.0


# A device that announces a reply and uploads nothing, and Flower's own grid


class SuperLink(LocalHttpGrid):
    """Flower's own grid, whose SuperLink counts its requests.

    Args:
        num_nodes: how many.
        withheld: message types of which these nodes announce a reply and upload nothing.
        seconds: of every upload's download.
    """

    def __init__(self, num_nodes, withheld=None, seconds=0.0):
        super().__init__(LocalGrid(shared_noise_app(), num_nodes))
        self.withheld, self.seconds, self.over = withheld or {}, seconds, False
        self.requests, self.most = Counter(), 0
        self._connect()

    def _connect(self):
        self._client = Connection(self)

    def reply(self, message, reply, objects):
        withheld = message.metadata.message_type in self.withheld.get(message.metadata.dst_node_id, ())
        return reply.object_id, objects, {} if withheld else objects


class Connection:
    """A connection to it, which can be closed."""

    def __init__(self, link):
        self.link, self.closed = link, False

    def close(self):
        self.closed = True

    def PullMessages(self, request):
        self.link.requests["PullMessages"] += 1
        return self.link.PullMessages(request)

    def PullObject(self, request):
        if self.closed or self.link.over:
            raise RuntimeError("Cannot send a request, as the client has been closed.")
        self.link.requests["PullObject"] += 1
        self.link.most = max(self.link.most, sum(thread.name == "pull" for thread in threading.enumerate()))
        time.sleep(self.link.seconds)
        return self.link.PullObject(request)

    def ConfirmMessageReceived(self, request):
        pass


@pytest.fixture(params=["known", "unknown"])
def superlink(request, monkeypatch):
    """Make SuperLinks of a release of Flower whose steps are known, or not; their threads end with the test."""
    if request.param == "unknown":
        monkeypatch.setattr(grid_replies, "_STEPS", ("a_name_that_it_has_no_more",))
        monkeypatch.setitem(inflatable_utils.pull_objects.__kwdefaults__, "initial_backoff", 0.2)
    made = []
    yield lambda *arguments, **named: made.append(SuperLink(*arguments, **named)) or made[-1]
    for link in made:
        link.over = True


def gone():
    """Wait until no pull is under way any more."""
    end = time.monotonic() + 10
    while any(thread.name == "pull" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("num_nodes", "num_withheld", "kinds"), [(5, 2, ("train",)), (5, 2, ("query", "train")), (16, 12, ("train",))]
)
def test_a_reply_that_is_announced_and_not_uploaded_holds_up_nobody(num_nodes, num_withheld, kinds, superlink):
    """Nor do many, in the line before those of the others."""
    honest = num_nodes - num_withheld
    grid, begun = superlink(num_nodes, withheld=dict.fromkeys(range(1, num_withheld + 1), kinds)), time.monotonic()
    made = strategy(honest if "query" in kinds else num_nodes)
    made.start(grid, model_arrays(linear()), num_rounds=1, timeout=2.5)
    assert made.rounds[0].replies == honest
    assert time.monotonic() - begun < 8
    gone()


def asked_of(grid, num_nodes):
    return [Message(RecordDict(), node, "query") for node in range(1, num_nodes + 1)]


def test_the_deadline_is_looked_at_between_replies():
    """100 nodes, each object of whose replies takes 100 ms to download."""
    grid = SuperLink(100, seconds=0.1)
    messages = asked_of(grid, 100)
    begun = time.monotonic()
    assert 0 < len(list(Replies(grid, messages, 3.0))) < 100
    assert time.monotonic() - begun < 6


def test_many_replies_take_one_request_and_devices_that_upload_nothing_no_thread():
    """100 devices, of which 99 announce a reply that they never upload: each of these is looked for less and less often."""
    grid = SuperLink(100, withheld=dict.fromkeys(range(1, 100), ("query",)))
    before, replies = threading.active_count(), []
    for reply in Replies(grid, asked_of(grid, 100), 3.0):
        replies.append(reply)
        # Flower pulls an object in a few threads of its own, and other tests' threads may begin meanwhile; one a device would be 99.
        assert threading.active_count() <= before + 10
    assert [reply.metadata.src_node_id for reply in replies] == [100]
    assert grid.requests["PullMessages"] < 25
    assert grid.requests["PullObject"] < 100 * 8 * 3
    gone()


def test_where_flowers_steps_are_not_known_pulls_take_a_limited_number_of_threads(monkeypatch):
    monkeypatch.setattr(grid_replies, "_STEPS", ("a_name_that_it_has_no_more",))
    monkeypatch.setattr(grid_replies, "_MOST_THREADS", 5)
    grid, begun = SuperLink(30, withheld=dict.fromkeys(range(1, 31), ("query",))), time.monotonic()
    assert list(Replies(grid, asked_of(grid, 30), 2.0)) == []
    grid.over = True
    assert time.monotonic() - begun < 4
    assert 1 <= grid.most <= 5
