"""Client-level releases: what noise is in the released model, and what the ledger says about it.

Statistical tests use the chi-square interval of a sample standard deviation; each has a false-alarm rate of 1e-6, and the
same interval rejects a std that is 5 % wrong.
"""

import math

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from flwr.app import Array as FlowerArray
from scipy import stats
from torch import nn

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSMP
from tests.charges import charge
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

SIZE = 4000
FALSE_ALARMS = 1e-6


def std_is(samples: np.ndarray, std: float) -> bool:
    """Whether independent centred Gaussian samples are compatible with this std."""
    ratio = float(np.sum(np.asarray(samples, np.float64) ** 2)) / std**2
    low, high = stats.chi2.interval(1 - FALSE_ALARMS, samples.size)
    return low < ratio < high


def assert_std(samples, std):
    assert std_is(samples, std)
    assert not std_is(samples, 1.05 * std)
    assert not std_is(samples, std / 1.05)


def increments(strategy, grid, record, num_rounds):
    """What each round added to the model [rounds, d]."""
    models = []

    def keep(server_round, current):
        models.append(np.concatenate([array.numpy().ravel() for array in current.values()]).astype(np.float64))

    strategy.start(grid, record, num_rounds=num_rounds, evaluate_fn=keep)
    return np.diff(np.stack(models), axis=0)


def still_app(num_clients):
    """Clients of this package whose update is zero: their learning rate is far below float32's resolution."""
    inputs, targets = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)

    def client_fn(context):
        part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        return DPClient(
            model=still_model(),
            clients={f"c{i:03}": TensorRecords(inputs=inputs, targets=targets) for i in range(part, num_clients, parts)},
            training=Training(learning_rate=1e-30),
        )

    return client_app(client_fn)


def still_model():
    model = nn.Linear(1, SIZE // 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


ZEROS = {"w": np.zeros(SIZE, np.float32)}


@pytest.mark.slow
def test_central_noise_has_std_z_c_over_the_expected_cohort():
    strategy = DPFedAvg(
        clip_norm=0.5, noise_multiplier=4.0, sampling=PoissonSampling(sampling_rate=0.25), num_clients=8, delta=1e-3
    )
    steps = increments(strategy, LocalGrid(stock_app(shifted(lambda node: 0.0)), 8), arrays(**ZEROS), 8)
    # Cohorts differ, are even empty; noise and denominator do not.
    assert len({report.cohort_size for report in strategy.rounds}) > 1
    assert_std(steps, 4.0 * 0.5 / (0.25 * 8))
    assert abs(np.corrcoef(steps)[np.triu_indices(8, 1)]).max() < 0.12


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [FullSampling(), PoissonSampling(sampling_rate=0.5), RoundRobinSampling(cohort_size=3)])
def test_distributed_shares_add_up_to_the_same_noise_whoever_takes_part(sampling):
    strategy = DPFedSAM(clip_norm=0.5, noise_multiplier=4.0, sampling=sampling, num_clients=8, delta=1e-3)
    steps = increments(strategy, LocalGrid(still_app(8), 2), model_arrays(still_model()), 6)
    std = 4.0 * 0.5 / sampling.expected_cohort(8)
    assert_std(steps, std)
    # Round by round as well: a std that followed the size of the cohort would tell who took part.
    assert all(std_is(step, std) for step in steps)


@pytest.mark.slow
def test_sparse_messages_carry_the_share_that_is_charged():
    """Only the four smallest of 4,000 coordinates are left out, so that the std is that of the whole noise."""
    strategy = DPFedSAM(clip_norm=0.5, noise_multiplier=0.8, sampling=FullSampling(), num_clients=4, delta=1e-3, keep_ratio=0.999)
    steps = increments(strategy, LocalGrid(still_app(4), 4), model_arrays(still_model()), 10)
    assert_std(steps, 0.8 * 0.5 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [1, 3, 4])
def test_a_trusted_server_tops_up_the_noise_of_missing_clients(drop):
    strategy = DPFedSAM(clip_norm=0.5, noise_multiplier=0.8, sampling=FullSampling(), num_clients=4, delta=1e-3)
    # All answer in the first and the fourth round: a run in which nobody does for three rounds in a row is given up.
    quiet = (1, 2, 4)
    grid = LocalGrid(
        still_app(4), 4, tamper=lambda node, reply: [] if len(strategy.rounds) in quiet and node <= drop else [reply]
    )
    steps = increments(strategy, grid, model_arrays(still_model()), 5)
    assert strategy.missing.total == len(quiet) * drop
    assert_std(steps, 0.8 * 0.5 / 4)
    # Against a participant, who knows one of the four shares; against outsiders with all the noise.
    against = {adversary.name: adversary for adversary in strategy.statement.adversaries}
    for name, multiplier in (("participants", 0.8 * math.sqrt(3 / 4)), ("outsiders", 0.8)):
        event = SelfComposedDpEvent(GaussianDpEvent(multiplier), 5)
        assert against[name].epsilon == pytest.approx(accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon)
        assert against[name].noise_std == pytest.approx(multiplier * 0.5)
    assert strategy.statement.epsilon == against["participants"].epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "fewest"), [(None, 6), (0.5, 4), (1.0, 8), (0.01, 1)])
def test_without_a_trusted_server_the_fewest_who_may_answer_carry_all_the_noise(ratio, fewest):
    arguments = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 8, "delta": 1e-3}

    def run(answering):
        strategy = DPFedSAM(**arguments, trusted_server=False, min_reply_ratio=ratio)
        grid = LocalGrid(still_app(8), 8, tamper=lambda node, reply: [reply] if node <= answering or not strategy.rounds else [])
        return strategy, increments(strategy, grid, model_arrays(still_model()), 5)

    strategy, steps = run(fewest)
    # One participant's share is known to it; where one share is all the noise, that participant is the whole sum.
    left = 0.8 * math.sqrt((fewest - 1) / fewest) if fewest > 1 else 0.8
    event = SelfComposedDpEvent(GaussianDpEvent(left), 5)
    cost = accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one")
    assert strategy.statement.epsilon == pytest.approx(cost.epsilon)
    # The first round has all eight replies, the others as few as there may be: no less noise than is charged.
    assert_std(steps[1:], 0.8 * 0.5 / 8)
    assert std_is(steps[0], 0.8 * 0.5 / 8 * math.sqrt(8 / fewest))
    if fewest > 1:
        strategy, steps = run(fewest - 1)
        # Too few: charged, and not released.
        assert steps[0].any()
        assert not steps[1:].any()
        assert strategy.rules.ledger(strategy.charges).num_charges == 5
        assert sum("too few for the noise" in line for line in strategy.statement.incidents) == 4


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_without_a_trusted_server_sampling_lowers_no_cost(relation):
    """The std of the sum tells how many of the drawn clients answered, and so who was drawn."""
    sampler = PoissonSampling if relation == "add-or-remove-one" else FixedSizeSampling
    arguments = {"sampling_rate": 0.5} if relation == "add-or-remove-one" else {"cohort_size": 3}
    strategy = DPFedSAM(
        clip_norm=0.5, noise_multiplier=3.0, sampling=sampler(**arguments), num_clients=6, delta=1e-3, trusted_server=False
    )
    strategy.start(LocalGrid(still_app(6), 6), model_arrays(still_model()), num_rounds=12)
    shares = [max(1, math.ceil(0.75 * report.cohort_size)) for report in strategy.rounds]
    assert len(set(shares)) > (relation == "add-or-remove-one")
    event = ComposedDpEvent([GaussianDpEvent(3.0 * math.sqrt((n - 1) / n) if n > 1 else 3.0) for n in shares])
    assert strategy.statement.epsilon == pytest.approx(accounting.epsilon(event, delta=1e-3, relation=relation).epsilon)
    assert "sampling lowers no cost" in str(strategy.statement)
    assert "nobody knows the cohorts" in strategy.statement.paper.reason


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [FullSampling(), PoissonSampling(sampling_rate=0.5), RoundRobinSampling(cohort_size=3)])
def test_dropouts_pass_no_target(sampling):
    arguments = {"clip_norm": 0.5, "noise_multiplier": 5.0, "sampling": sampling, "num_clients": 6, "delta": 1e-3}
    grid = LocalGrid(still_app(6), 6, tamper=lambda node, reply: [] if node <= 2 else [reply])
    strategy = DPFedSAM(**arguments, target_epsilon=2.0, trusted_server=False)
    strategy.start(grid, model_arrays(still_model()), num_rounds=90)
    assert 1 < len(strategy.rounds) < 90
    assert 1.5 < strategy.statement.epsilon <= 2.0


def test_a_round_without_a_trusted_server_is_charged_by_the_shares_of_its_own_cohort():
    arguments = {"clip_norm": 0.5, "noise_multiplier": 5.0, "num_clients": 6, "delta": 1e-3}
    strategy = DPFedSAM(**arguments, sampling=PoissonSampling(sampling_rate=0.5), trusted_server=False)
    strategy.start(LocalGrid(still_app(6), 6), model_arrays(still_model()), num_rounds=12)
    shares = [max(1, math.ceil(0.75 * report.cohort_size)) for report in strategy.rounds]
    assert len(set(shares)) > 1
    # A participant subtracts its own share of them.
    left = [5.0 * math.sqrt((count - 1) / count) if count > 1 else 5.0 for count in shares]
    composed = 1 / math.sqrt(sum(one**-2 for one in left))
    expected = accounting.epsilon(GaussianDpEvent(composed), delta=1e-3, relation="add-or-remove-one").epsilon
    assert strategy.statement.epsilon == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_central_top_k_keeps_the_largest_of_the_noised_mean():
    strategy = DPFedSAM(
        clip_norm=0.5,
        noise_multiplier=0.8,
        sampling=FullSampling(),
        num_clients=4,
        delta=1e-3,
        placement="central",
        keep_ratio=0.1,
    )
    steps = increments(strategy, LocalGrid(still_app(4), 2), model_arrays(still_model()), 5)
    assert [(step != 0).sum() for step in steps] == [SIZE // 10] * 5
    # The largest tenth of |N(0, s)| lies beyond its 90 % quantile, 1.645 s: noise came first, then the choice.
    std = 0.8 * 0.5 / 4
    smallest = np.array([np.abs(step[step != 0]).min() for step in steps])
    assert np.allclose(smallest, stats.norm.ppf(0.95) * std, rtol=0.06)
    assert strategy.statement.epsilon == pytest.approx(
        accounting.epsilon(SelfComposedDpEvent(GaussianDpEvent(0.8), 5), delta=1e-3, relation="add-or-remove-one").epsilon
    )


@pytest.mark.slow
def test_quantised_messages_are_small_and_claim_only_what_each_share_proves():
    strategy = DPFedSAM(
        clip_norm=0.5,
        noise_multiplier=0.8,
        sampling=PoissonSampling(sampling_rate=0.5),
        num_clients=8,
        delta=1e-3,
        quantization_levels=1,
    )
    grid = LocalGrid(still_app(8), 8)
    start = model_arrays(still_model())
    result = strategy.start(grid, start, num_rounds=4)
    assert grid.received
    total = 0.0
    for reply in grid.received:
        (array,) = next(iter(reply.content.array_records.values())).values()
        # 4,000 coordinates of 1.7 bits; as they are most of them 0, far less.
        assert array.numpy().dtype == np.uint8
        assert array.numpy().nbytes < 0.6 * 4000 / 8  # some 50 coordinates of 4,000 are not 0, 7 more or less
        total += array.numpy().nbytes
    assert strategy.missing.total == 0
    assert sum(report.bytes_per_client * report.replies for report in strategy.rounds) == pytest.approx(total)
    # A round of noise alone: the mean of ternary rows of length share x sqrt(4,000) each, at random signs.
    assert np.isfinite(result.arrays["weight"].numpy()).all()
    share = GaussianDpEvent(0.8 / math.sqrt(4))
    expected = accounting.epsilon(SelfComposedDpEvent(share, 4), delta=1e-3, relation="add-or-remove-one").epsilon
    assert strategy.statement.epsilon == pytest.approx(expected)
    assert not strategy.rules.noise.secret_cohort
    assert not strategy.statement.paper.valid
    assert "quantisation (1 levels above 0)" in strategy.statement.paper.reason
    assert "not post-processing" in strategy.statement.paper.reason
    assert "epsilon rests on each client's own share of noise: what it sends is a random quantisation" in str(strategy.statement)
    assert "known to nobody" not in str(strategy.statement)


def test_top_k_and_levels_go_together_and_the_statement_names_both():
    own = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 2, "delta": 1e-3}
    strategy = DPFedSAM(**own, keep_ratio=0.1, quantization_levels=3)
    grid = LocalGrid(still_app(2), 2)
    strategy.start(grid, model_arrays(still_model()), num_rounds=1)
    assert "top-k and a random quantisation (3 levels above 0)" in str(strategy.statement)


def test_levels_without_noise_on_the_client_are_refused():
    own = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 2, "delta": 1e-3}
    with pytest.raises(ValueError, match="quantization_levels=2: is read with placement='distributed' only"):
        DPFedSAM(**own, placement="central", quantization_levels=2)
    with pytest.raises(ValueError, match="quantization_levels=0"):
        DPFedSAM(**own, quantization_levels=0)


@pytest.mark.slow
def test_distributed_top_k_sends_small_payloads_and_claims_only_what_each_share_proves():
    strategy = DPFedSAM(
        clip_norm=0.5,
        noise_multiplier=0.8,
        sampling=PoissonSampling(sampling_rate=0.5),
        num_clients=8,
        delta=1e-3,
        keep_ratio=0.1,
    )
    grid = LocalGrid(still_app(8), 8)
    strategy.start(grid, model_arrays(still_model()), num_rounds=4)
    for reply in grid.received:
        sizes = [array.numpy().nbytes for array in next(iter(reply.content.array_records.values())).values()]
        # A tenth of 4,000 values of 4 bytes, and the smaller of a bit a coordinate and 2 bytes an index.
        assert sum(sizes) == 400 * 4 + min(4000 // 8, 400 * 2)
    # A client that is not drawn sends no coordinates at all, which can be told from a zero update: no amplification.
    share = GaussianDpEvent(0.8 / math.sqrt(4))
    expected = accounting.epsilon(SelfComposedDpEvent(share, 4), delta=1e-3, relation="add-or-remove-one").epsilon
    assert strategy.statement.epsilon == pytest.approx(expected)
    assert not strategy.statement.paper.valid
    assert "not post-processing" in strategy.statement.paper.reason
    assert strategy.statement.paper.epsilon < expected


def test_why_top_k_of_single_noised_updates_is_not_covered_by_the_noise_of_the_sum():
    """Whether one client takes part can be read off a coordinate that nobody else would choose."""
    rng = np.random.default_rng(0)
    clip_norm, noise_multiplier, cohort, size, trials = 1.0, 1.0, 100, 50, 400
    share = noise_multiplier * clip_norm / math.sqrt(cohort)

    def released(with_target):
        updates = np.zeros((cohort, size))
        updates[:, 0] = clip_norm
        if with_target:
            updates[0] = 0
            updates[0, 1] = clip_norm
        noised = updates + rng.normal(0, share, updates.shape)
        kept = np.argmax(np.abs(noised), axis=1)  # top-1
        return noised[np.arange(cohort), kept] @ np.eye(size)[kept]

    # Against Gaussian noise of std z C on the whole sum nobody guesses right more often than Phi(1 / (2 z)) = 69 %.
    right = [float(released(True)[1] > 0.5) + float(released(False)[1] <= 0.5) for _ in range(trials)]
    assert sum(right) / (2 * trials) > 0.99


# The ledger


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "relation", "event"),
    [
        (PoissonSampling(sampling_rate=0.5), "add-or-remove-one", PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0))),
        (PoissonSampling(sampling_rate=0.5), "replace-one", PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0))),
    ],
)
@pytest.mark.parametrize("strategy_class", [DPFedAvg, DPFedSAM])
def test_every_round_is_charged_as_its_release(strategy_class, sampling, relation, event):
    strategy = strategy_class(
        clip_norm=1.0, noise_multiplier=2.0, sampling=sampling, num_clients=6, delta=1e-3, relation=relation
    )
    strategy.start(LocalGrid(still_app(6), 2), model_arrays(still_model()), num_rounds=3)
    expected = accounting.epsilon(SelfComposedDpEvent(event, 3), delta=1e-3, relation=relation)
    outsiders = strategy.statement.adversaries[0]
    assert (outsiders.name, outsiders.epsilon) == ("outsiders", pytest.approx(expected.epsilon))
    assert (strategy.statement.epsilon == outsiders.epsilon) == (strategy_class is DPFedAvg)
    assert strategy.statement.epsilon >= outsiders.epsilon
    assert strategy.statement.num_rounds == 3


def test_fixed_size_sampling_is_accounted_as_such_with_twice_the_sensitivity():
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=4.0, sampling=FixedSizeSampling(cohort_size=3), num_clients=6, delta=1e-3)
    strategy.start(LocalGrid(still_app(6), 2), model_arrays(still_model()), num_rounds=4)
    statement = strategy.statement
    assert statement.relation == "replace-one"
    # Never below the unsampled bound at half the sensitivity's multiplier with a quarter of the rounds, and never above the
    # unsampled one: exact Gaussian at noise std / (2 C).
    unsampled = accounting.epsilon(SelfComposedDpEvent(GaussianDpEvent(4.0), 4), delta=1e-3, relation="replace-one").epsilon
    one_sensitivity = accounting.rdp_epsilon(
        SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(4.0)), 4), delta=1e-3, relation="add-or-remove-one"
    )
    assert one_sensitivity < statement.epsilon <= unsampled
    assert not statement.paper.valid
    assert "Poisson" in statement.paper.reason


@pytest.mark.slow
def test_round_robin_charges_the_busiest_client():
    strategy = DPFedAvg(
        clip_norm=1.0, noise_multiplier=1.0, sampling=RoundRobinSampling(cohort_size=2), num_clients=6, delta=1e-3
    )
    strategy.start(LocalGrid(still_app(6), 2), model_arrays(still_model()), num_rounds=7)
    # 14 participations of 6 clients: somebody takes part three times.
    expected = accounting.epsilon(SelfComposedDpEvent(GaussianDpEvent(1.0), 3), delta=1e-3, relation="add-or-remove-one")
    assert strategy.statement.epsilon == pytest.approx(expected.epsilon)
    # A round out of turn is refused under the sampling's own name, which may be that of a user's.
    assert strategy.rules.why_stop(strategy.state, 9, None) == "with RoundRobinSampling(cohort_size=2) it must be round 8"


@pytest.mark.slow
def test_epsilon_during_a_run_never_understates_the_statement():
    strategy = DPFedAvg(
        clip_norm=1.0, noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=0.25), num_clients=8, delta=1e-3
    )
    strategy.start(LocalGrid(still_app(8), 2), model_arrays(still_model()), num_rounds=12)
    shown = [report.epsilon for report in strategy.rounds]
    assert shown == sorted(shown)
    for num_rounds in (1, 6, 12):
        event = SelfComposedDpEvent(PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0)), num_rounds)
        tight = accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon
        assert tight <= shown[num_rounds - 1] <= 1.01 * tight
    assert strategy.statement.epsilon <= shown[-1]


@pytest.mark.exact
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PoissonSampling(sampling_rate=0.1), FixedSizeSampling(cohort_size=20), FullSampling()])
def test_epsilon_during_a_run_is_no_more_than_the_target_that_it_keeps(sampling):
    """A bound of 0.50002 on a coarser grid is shown as 0.501, as if the target of 0.5 had been missed."""
    strategy = DPFedAvg(clip_norm=0.5, epsilon=0.5, num_rounds=30, sampling=sampling, num_clients=200, delta=1e-3)
    strategy.plan(30)
    rules, relation = strategy.rules, strategy.rules.ledger(strategy.charges).relation
    shown = [rules._planned.epsilon(number) for number in range(1, 31)]
    assert shown[-1] <= 0.5
    assert rules._planned.epsilon(31) is None
    for number in (1, 15, 30):  # and no less than what is proved
        assert accounting.epsilon(rules._events(number), delta=1e-3, relation=relation).epsilon <= shown[number - 1]
    assert shown[-1] > 0.4999


# Not private


def test_without_noise_top_k_still_keeps_only_its_part():
    def client_fn(context):
        records = TensorRecords(inputs=torch.rand(8, 50), targets=torch.randint(0, 4, (8,)))
        return DPClient(model=nn.Linear(50, 4), clients={"c": records}, training=Training(learning_rate=0.1))

    strategy = DPFedSAM(clip_norm=9, noise_multiplier=0, sampling=FullSampling(), num_clients=1, delta=1e-3, keep_ratio=0.1)
    steps = increments(strategy, LocalGrid(client_app(client_fn), 1), model_arrays(nn.Linear(50, 4)), 2)
    # 204 parameters; a tenth, rounded up.
    assert [(step != 0).sum() for step in steps] == [21, 21]


def test_without_noise_the_statement_says_not_private():
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0, sampling=FullSampling(), num_clients=2, delta=1e-3)
    strategy.start(LocalGrid(stock_app(shifted(lambda node: 1.0)), 2), arrays(**ZEROS), num_rounds=1)
    assert strategy.statement.epsilon == math.inf
    assert strategy.statement.to_dict()["epsilon"] is None
    assert not strategy.statement.to_dict()["private"]
    assert "NOT PRIVATE" in str(strategy.statement)


def test_fixed_noise_on_the_server_makes_a_run_not_private_and_on_a_client_its_reply_refused():
    server = DPFedAvg(clip_norm=1, noise_multiplier=1, sampling=FullSampling(), num_clients=2, delta=1e-3, noise_seed=1)
    server.start(LocalGrid(stock_app(shifted(lambda node: 1.0)), 2), arrays(**ZEROS), num_rounds=1)
    assert server.statement.epsilon == server.epsilon == math.inf

    def client_fn(context):
        records = TensorRecords(inputs=torch.ones(2, 1), targets=torch.zeros(2, dtype=torch.int64))
        return DPClient(model=still_model(), clients={"c": records}, training=Training(learning_rate=1e-30), noise_seed=3)

    client = DPFedSAM(clip_norm=1, noise_multiplier=1, sampling=FullSampling(), num_clients=1, delta=1e-3)
    with pytest.raises(RuntimeError, match=r"no client has sent a usable update in any round.*from a fixed seed"):
        client.start(LocalGrid(client_app(client_fn), 1), model_arrays(still_model()), num_rounds=1)
    assert client.statement.private
    assert "replies with noise from a fixed seed were refused" in str(client.statement)


@pytest.mark.slow
def test_a_statement_read_during_a_round_is_not_the_last_word():
    """Replies, missing shares, a client's fixed seed and the end of the run all come after the charge."""
    read = []

    def peek(node, reply):
        read.append(strategy.statement)
        return [] if node <= 3 else [reply]

    arguments = {"clip_norm": 0.5, "noise_multiplier": 3.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    strategy = DPFedSAM(**arguments)
    strategy.start(LocalGrid(still_app(4), 4, tamper=peek), model_arrays(still_model()), num_rounds=1)
    assert not read[-1].incidents
    assert any("3 updates" in line for line in strategy.statement.incidents)

    def client_fn(context):
        records = TensorRecords(inputs=torch.ones(2, 1), targets=torch.zeros(2, dtype=torch.int64))
        seed = 3 if context.node_id == 1 else None
        name = f"c{context.node_id}"
        return DPClient(model=still_model(), clients={name: records}, training=Training(learning_rate=1e-30), noise_seed=seed)

    strategy = DPFedSAM(**arguments | {"num_clients": 2})
    grid = LocalGrid(client_app(client_fn), 2, tamper=lambda node, reply: read.append(strategy.statement) or [reply])
    strategy.start(grid, model_arrays(still_model()), num_rounds=1)
    assert not read[-1].incidents
    assert any("fixed seed" in line for line in strategy.statement.incidents)
    assert strategy.statement.private

    strategy = DPFedAvg(**arguments, target_epsilon=2.0)
    result = strategy.start(
        LocalGrid(still_app(4), 4),
        model_arrays(still_model()),
        num_rounds=90,
        evaluate_fn=lambda server_round, arrays: read.append(strategy.statement),
    )
    assert 1 < len(result.train_metrics_clientapp) < 90
    assert any(line.startswith("ended before round") for line in strategy.statement.incidents)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3e38, 1e30, 1.0])
def test_rows_beyond_any_honest_one_are_refused_where_the_server_cannot_clip(size):
    """Where clients add the noise the server can't clip; but it knows how long an honest row can be."""

    def forge(node, reply):
        if node > 1:
            return [reply]
        record = next(iter(reply.content.array_records.values()))
        for name, array in record.items():
            record[name] = FlowerArray(np.full_like(array.numpy(), size))
        return [reply]

    strategy = DPFedSAM(clip_norm=0.5, noise_multiplier=0.8, sampling=FullSampling(), num_clients=4, delta=1e-3)
    steps = increments(strategy, LocalGrid(still_app(4), 4, tamper=forge), model_arrays(still_model()), 5)
    # The noise of a refused client is made up for: every round is as without it.
    assert_std(steps, 0.8 * 0.5 / 4)
    assert strategy.missing.total == 5


@pytest.mark.slow
def test_honest_rows_are_not_refused_for_their_length():
    strategy = DPFedSAM(clip_norm=0.5, noise_multiplier=0.8, sampling=FullSampling(), num_clients=4, delta=1e-3)
    strategy.start(LocalGrid(still_app(4), 2), model_arrays(still_model()), num_rounds=30)
    assert strategy.missing.total == 0


def test_a_model_that_would_leave_the_range_of_its_dtype_is_left_out():
    """The noise has a standard deviation of 1e40, and float32 ends at 3.4e38."""
    strategy = DPFedAvg(clip_norm=1e38, noise_multiplier=100, sampling=FullSampling(), num_clients=1, delta=1e-3)
    grid = LocalGrid(stock_app(lambda node, arrays: arrays), 1)
    result = strategy.start(grid, arrays(w=np.full(4, 2, np.float32)), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [2] * 4
    assert strategy.incidents == ("round 1 was left out: array 'w' would leave the range of its dtype",)


@pytest.mark.parametrize("method", [DPFedAvg, DPFedSAM])
def test_a_flag_is_no_clip_norm(method):
    with pytest.raises(ValueError, match=r"clip_norm=True: must be a finite number > 0"):
        method(clip_norm=True, noise_multiplier=1, sampling=FullSampling(), num_clients=6, delta=1e-3)


def test_min_reply_ratio_is_refused_where_nobody_reads_it():
    arguments = {"clip_norm": 1, "noise_multiplier": 1, "sampling": FullSampling(), "num_clients": 6, "delta": 1e-3}
    for more in ({}, {"placement": "central", "trusted_server": False}):
        with pytest.raises(ValueError, match=r"min_reply_ratio=0\.5: is read with"):
            DPFedSAM(**arguments, min_reply_ratio=0.5, **more)
    with pytest.raises(ValueError, match=r"min_reply_ratio=1\.1"):
        DPFedSAM(**arguments, min_reply_ratio=1.1, trusted_server=False)


def test_fixed_size_sampling_under_add_or_remove_is_refused_by_name():
    arguments = {"clip_norm": 1, "noise_multiplier": 1, "num_clients": 6, "delta": 1e-4, "relation": "add-or-remove-one"}
    with pytest.raises(ValueError, match="relation='add-or-remove-one': sampling of a fixed size"):
        DPFedAvg(**arguments, sampling=FixedSizeSampling(cohort_size=2))
    DPFedAvg(**arguments, sampling=FixedSizeSampling(cohort_size=6))


def test_a_server_that_adds_the_noise_is_trusted():
    for strategy_class in (DPFedAvg, DPFedSAM, FedSMP):
        with pytest.raises(ValueError, match="trusted_server=False: is read with placement='distributed' only"):
            strategy_class(
                clip_norm=1,
                noise_multiplier=1,
                sampling=FullSampling(),
                num_clients=2,
                delta=1e-3,
                placement="central",
                trusted_server=False,
            )


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("strategy_class", [DPFedAvg, FedSMP], ids=["dp-fedavg", "fed-smp"])
def test_placement_means_the_same_for_every_noised_sum(strategy_class, trusted):
    arguments = {
        "clip_norm": 0.5,
        "noise_multiplier": 2.0,
        "sampling": PoissonSampling(sampling_rate=0.5),
        "num_clients": 20,
        "delta": 1e-3,
        "placement": "distributed",
        "trusted_server": trusted,
    }
    if not trusted:
        arguments["min_reply_ratio"] = 0.5
    made, sam = strategy_class(**arguments), DPFedSAM(**arguments)
    assert made.rules.noise == sam.rules.noise
    for strategy in (made, sam):
        charge(strategy, [f"client-{number}" for number in range(8)])
    said, other = made.statement, sam.statement
    assert said.method in ("DP-FedAvg", "Fed-SMP-rand_k")
    assert (said.epsilon, said.adversary, said.assumptions) == (other.epsilon, other.adversary, other.assumptions)
    assert said.adversaries == other.adversaries
    assert made.rules.about.stock_refusal is not None


def test_an_untrusted_server_is_not_made_trusted_by_a_text():
    with pytest.raises(ValueError, match="trusted_server='no': must be True or False"):
        DPFedSAM(clip_norm=1, noise_multiplier=1, sampling=FullSampling(), num_clients=2, delta=1e-3, trusted_server="no")
