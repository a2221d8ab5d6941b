import math

import numpy as np
import pytest
from scipy.optimize import minimize

from flower_dp.planning import ProblemError, dp_fedpaq, dp_pasgd, fedsgd_dpc, nbafl
from flower_dp.planning.constants import estimate
from flower_dp.planning.planner import Data
from tests.planning.problems import FEDPAQ, GAUSSIAN, LAPLACE, PASGD

CLASSES = 3
L2 = 0.05


def three_clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Three clients of different sizes and different label mixes."""
    rng = np.random.default_rng(0)
    clients = []
    for client, size in enumerate((12, 20, 9)):
        labels = rng.choice(CLASSES, size, p=np.roll([0.7, 0.2, 0.1], client))
        clients.append((rng.standard_normal((size, 4)) + labels[:, None] * [1.0, -1.0, 0.5, 0.0], labels))
    return clients


# An independent implementation: one record at a time, no matrices but the outer product.
def record_loss(theta: np.ndarray, x: np.ndarray, y: int) -> float:
    logits = [float(np.dot(row, x)) for row in theta]
    return math.log(sum(math.exp(z) for z in logits)) - logits[y] + L2 / 2 * float(np.sum(theta**2))


def record_gradient(theta: np.ndarray, x: np.ndarray, y: int) -> np.ndarray:
    weights = np.asarray([math.exp(float(np.dot(row, x))) for row in theta])
    return np.outer(weights / weights.sum() - np.eye(CLASSES)[y], x) + L2 * theta


def loss(theta: np.ndarray, client: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.mean([record_loss(theta, x, int(y)) for x, y in zip(*client, strict=True)]))


def gradient(theta: np.ndarray, client: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return np.asarray(np.mean([record_gradient(theta, x, int(y)) for x, y in zip(*client, strict=True)], axis=0))


def optimum(client: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, float]:
    shape = (CLASSES, client[0].shape[1])
    found = minimize(
        lambda flat: loss(flat.reshape(shape), client),
        np.zeros(shape).ravel(),
        jac=lambda flat: gradient(flat.reshape(shape), client).ravel(),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    return found.x.reshape(shape), float(found.fun)


def pooled(clients: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])


class TestOptima:
    def test_everything_that_rests_on_optima(self):
        clients = three_clients()
        constants = estimate(clients, l2=L2, num_classes=CLASSES)
        shares = np.asarray([12, 20, 9]) / 41
        theta, joint = optimum(pooled(clients))
        losses = np.asarray([optimum(client)[1] for client in clients])
        assert constants.heterogeneity == pytest.approx(joint - shares @ losses, rel=1e-6)
        assert constants.initial_distance == pytest.approx(np.sum(theta**2), rel=1e-6)
        # F(0) = ln(number of classes): every class is equally likely.
        assert constants.initial_gap == pytest.approx(math.log(CLASSES) - joint, rel=1e-6)
        assert (constants.num_clients, constants.num_records, constants.dimension) == (3, (12, 20, 9), 12)

    def test_clients_that_mirror_each_other(self):
        # Client 2 has the labels of client 1 swapped: equal F_i*, opposite optima. The paper's estimate of Gamma would be 0.
        x = np.random.default_rng(1).standard_normal((30, 2))
        y = (x[:, 0] > 0).astype(int)
        constants = estimate([(x, y), (x, 1 - y)], l2=L2, num_classes=2)
        # Together the labels carry nothing: the joint optimum is theta = 0 with loss ln 2.
        assert constants.initial_gap == pytest.approx(0.0, abs=1e-12)
        assert constants.heterogeneity > 0.1
        # The gradients cancel at the start, so no B holds there, and the planner refuses it.
        assert constants.dissimilarity == math.inf
        rest = {"cohort_size": 2, "num_rounds": 5, "uplink_exposures": 1, "epsilon": 5.0, "delta": 0.01, "clip_norm": 2.0}
        with pytest.raises(ProblemError, match=r"^dissimilarity=inf: must be a finite number"):
            nbafl.plan(constants.nbafl() | rest | {"proximal": 1.0, "max_rounds": 5})


def test_curvature_one_half_is_reached():
    # One feature of 2, and two of three classes equally likely: curvature 2^2 / 2 + l2, and no record's is larger.
    constants = estimate([(np.full((5, 1), 2.0), [0, 1, 0, 1, 2])], l2=L2, num_classes=CLASSES)
    assert constants.smoothness == pytest.approx(2.0 + L2, rel=1e-12)
    assert constants.strong_convexity == L2


class TestGradients:
    def test_at_the_start_by_hand(self):
        # At theta = 0 the residual is 1/k - onehot: squared L2 norm (k-1)/k, L1 norm 2(k-1)/k. The data are easy, so that the
        # gradients only shrink along the pilot and the start has the largest.
        x = np.asarray([[3.0, 0.0], [0.0, 4.0], [-5.0, -1.0]])
        constants = estimate([(x, [0, 1, 2])], l2=L2, num_classes=3)
        squares = np.asarray([9.0, 16.0, 26.0]) * 2 / 3
        assert constants.gradient_bound == pytest.approx(math.sqrt(squares.mean()), rel=1e-12)
        assert constants.l2_norm == pytest.approx(math.sqrt(squares.max()), rel=1e-12)
        assert constants.l1_norm == pytest.approx(6.0 * 4 / 3, rel=1e-12)
        mean = gradient(np.zeros((3, 2)), (x, np.arange(3)))
        assert constants.lipschitz == pytest.approx(np.linalg.norm(mean), rel=1e-12)
        assert constants.gradient_variance[0] == pytest.approx(squares.mean() - np.sum(mean**2), rel=1e-12)

    def test_at_the_end_of_the_pilot(self):
        # The joint fit goes against a small client with the opposite labels: its gradients grow along the pilot.
        x = np.random.default_rng(4).standard_normal((50, 2)) + np.asarray([0.5, 0.0])
        y = (x[:, 0] > 0).astype(int)
        clients = [(x[:45], y[:45]), (x[45:], 1 - y[45:])]
        constants = estimate(clients, l2=L2, num_classes=CLASSES)
        theta, _ = optimum(pooled(clients))
        gradients = np.asarray([record_gradient(theta, row, int(label)) for row, label in zip(*clients[1], strict=True)])
        squares = np.sum(gradients**2, axis=(1, 2))
        assert constants.gradient_bound == pytest.approx(math.sqrt(squares.mean()), rel=1e-5)
        assert constants.l2_norm == pytest.approx(math.sqrt(squares.max()), rel=1e-5)
        assert constants.lipschitz == pytest.approx(np.linalg.norm(gradients.mean(axis=0)), rel=1e-5)

    def test_distances_of_gradients_along_the_pilot(self):
        clients = three_clients()
        constants = estimate(clients, l2=L2, num_classes=CLASSES)
        best, _ = optimum(pooled(clients))
        squares = []
        for theta in (np.zeros((CLASSES, 4)), best):  # the pilot's ends: at the start they are largest
            gradients = np.asarray([gradient(theta, client) for client in clients])
            squares.append([float(np.sum((one - gradients.mean(axis=0)) ** 2)) for one in gradients])
        assert constants.gradient_dissimilarity == pytest.approx(max(math.sqrt(np.mean(row)) for row in squares), rel=1e-6)
        assert constants.gradient_distance == pytest.approx(max(math.sqrt(max(row)) for row in squares), rel=1e-6)
        zero = np.zeros((CLASSES, 4))
        joint = np.sum(gradient(zero, pooled(clients)) ** 2)
        weighed = np.dot([12, 20, 9], [np.sum(gradient(zero, client) ** 2) for client in clients]) / 41
        assert constants.dissimilarity == pytest.approx(math.sqrt(weighed / joint), rel=1e-9)
        same = estimate([clients[0]] * 3, l2=L2, num_classes=CLASSES)
        assert same.gradient_dissimilarity == pytest.approx(0, abs=1e-12)
        assert same.gradient_distance == pytest.approx(0, abs=1e-12)


class TestProblems:
    @pytest.mark.parametrize(("gaussian", "problem"), [(False, LAPLACE), (True, GAUSSIAN)])
    def test_keys_of_fedsgd_dpc(self, gaussian, problem):
        constants = estimate(three_clients(), l2=L2, num_classes=CLASSES)
        keys = constants.fedsgd_dpc(gaussian=gaussian)
        rest = {key: problem[key] for key in ("mechanism", "epsilon", *(GAUSSIAN.keys() - LAPLACE.keys())) if key in problem}
        assert math.isfinite(fedsgd_dpc.plan(rest | keys).best.bound)
        assert keys["clip_norm"] == (constants.l2_norm if gaussian else constants.l1_norm)

    def test_one_hot_labels_are_labels(self):
        one_hot = [(x, np.eye(CLASSES)[y]) for x, y in three_clients()]
        assert estimate(one_hot, l2=L2, num_classes=CLASSES) == estimate(three_clients(), l2=L2, num_classes=CLASSES)

    @pytest.mark.parametrize(
        ("clients", "message"),
        [
            ([], r"^clients=\[\]"),
            ([(np.ones(3), [0, 1, 2])], r"^clients\[0\]: features must have shape"),
            ([(np.full((2, 2), np.nan), [0, 1])], r"^clients\[0\]: features must be finite"),
            ([(np.ones((2, 2)), [0, 3])], r"^clients\[0\]: labels must be whole numbers in 0..2"),
            ([(np.ones((2, 2)), [0.5, 1])], r"^clients\[0\]: labels must be whole numbers"),
            ([(np.ones((2, 2)), [0, 1, 2])], r"^clients\[0\]: labels must have shape"),
            ([(np.ones((2, 2)), np.ones((2, 3)))], r"^clients\[0\]: one-hot labels"),
            ([(np.ones((2, 2)), [0, 1]), (np.ones((2, 3)), [0, 1])], r"^clients: must all have the same number of features"),
        ],
    )
    def test_refuses_nonsense(self, clients, message):
        with pytest.raises(ValueError, match=message):
            estimate(clients, l2=L2, num_classes=CLASSES)

    def test_keys_of_dp_fedpaq_and_what_stays_to_be_named(self):
        constants = estimate(three_clients(), l2=L2, num_classes=CLASSES)
        found = dp_fedpaq.from_data(Data(constants=constants, num_records=(20, 20, 20), dimension=6), {})
        assert found.values["heterogeneity"] == constants.gradient_dissimilarity
        assert found.values["gradient_variance"] == max(constants.gradient_variance)
        assert found.values["num_records"] == 20
        rest = {key: FEDPAQ[key] for key in ("bits_budget", "num_iterations", "epsilon", "delta")} | {"batch_size": 2}
        assert set(found.values) | set(rest) == set(FEDPAQ)
        assert dp_fedpaq.plan({**found.values, **rest}).best is not None

    def test_keys_of_dp_pasgd_and_what_stays_to_be_named(self):
        constants = estimate(three_clients(), l2=L2, num_classes=CLASSES)
        data = Data(constants=constants, num_records=(20, 20, 20), dimension=6)
        rest = {key: PASGD[key] for key in ("cost_per_aggregation", "cost_per_step", "max_resource_cost", "epsilon", "delta")}
        rest |= {"learning_rate": 0.01, "batch_size": [5, 10, 20]}
        found = dp_pasgd.from_data(data, rest)
        # A batch of the smallest size, and how far the devices' gradients are apart.
        variance = max(constants.gradient_variance) / 5 + constants.gradient_distance**2
        assert found.values["gradient_variance"] == pytest.approx(variance)
        assert dp_pasgd.plan({**found.values, **rest})["num_rounds"] >= 1
        without = dp_pasgd.from_data(data, {})
        assert "gradient_variance" not in without.values
        assert "gradient_variance depends on batch_size, which the problem does not give" in without.notes
