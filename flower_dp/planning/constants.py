"""Estimate a problem's constants from the clients' data, for softmax regression with L2 regularization.

Client i's loss is F_i(theta) = mean over its records of -log softmax(theta x)_y, plus (l2/2) ||theta||^2; theta has one row of
weights per class. The joint loss F weighs clients by their numbers of records. All fits are full-batch, by Newton's method with
trust regions, from theta_0 = 0.

"Exact" means computed from the data, not guessed. If a paper needs a supremum over points that depend on the run (such as
gradient norms), the estimate is the maximum along the pilot: the iterates of the joint fit, start and end included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp

from flower_dp.core import checks

Floats = NDArray[np.float64]

NOT_PRIVATE = (
    "the constants were estimated: they are statistics of the clients' data, computed without noise; unless the data are"
    " public, neither they nor the plan that rests on them are private"
)

# The gradient norm at which a fit stops, as a fraction of the root mean square of the records' gradients at its start.
_TOLERANCE = 1e-8
# The gradient norm, as such a fraction, that still counts as an optimum if rounding stops a fit earlier.
_WORST = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of the papers. NOT PRIVATE: statistics of the clients' data, unless these are public.

    Definitions "Z" are of Zhou et al. (FedSGD-DPC), "W" of Wei et al. (NbAFL), "H" of Hu et al. (DP-PASGD), "M" of Mohammadi et
    al. (DP-FedPAQ).
    """

    num_clients: int
    num_records: tuple[int, ...]
    dimension: int
    strong_convexity: float
    """Z mu, Assumption 4: l2. Exact: the softmax loss has directions (the same vector added to all classes) without
    curvature."""
    smoothness: float
    """Z lambda, Assumption 3; W rho, Assumption 1.5: max over clients of lambda_max(X_i^T X_i / n_i) / 2 + l2. Valid
    for all theta: the Hessian of the loss in the logits, diag(p) - p p^T, is at most (I - 1 1^T/k)/2, whose largest
    eigenvalue is 1/2 (Boehning, Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44, 1992). 1/4 is
    the constant of one logit for two classes (Boehning and Lindsay 1988), a model with half as many weights as this
    one."""
    gradient_bound: float
    """Z G, Assumption 5, E||grad F_i(theta_t, zeta)||^2 <= G^2: the largest root of a client's mean squared per-record
    gradient norm, along the pilot, regularizer included."""
    gradient_variance: tuple[float, ...]
    """Z Lambda_i^2, Assumption 6: the largest mean squared distance of client i's per-record gradients from their mean,
    along the pilot."""
    l1_norm: float
    """Z xi_1, Assumption 1: no per-record gradient along the pilot has a larger L1 norm. An upper bound: the norm of
    the loss's gradient plus that of the regularizer's."""
    l2_norm: float
    """Z xi_2, Assumption 2: the largest L2 norm of a per-record gradient along the pilot."""
    heterogeneity: float
    """Z Gamma, Definition 4: F* - sum_i (n_i/n) F_i*. The estimate at the end of Section V-B, max_i F_i* - sum_i (n_i/n) F_i*,
    needs no joint fit, but may lie on either side: clients with equal F_i* and different optima get 0."""
    initial_distance: float
    """Z Y_0: ||theta_0 - theta*||^2."""
    lipschitz: float
    """W beta, Assumption 1.4: the largest gradient norm of a client's loss along the pilot (there is no bound for all
    theta)."""
    pl_constant: float
    """W l, Assumption 1.2: l2, since strong convexity implies the Polyak-Lojasiewicz condition with the same
    constant."""
    dissimilarity: float
    """W B, Lemma 2, eq. 11: sqrt(sum_i (n_i/n) ||grad F_i||^2) / ||grad F|| at theta_0. The lemma supposes ||grad F||
    to stay away from zero: toward the optimum B has no bound, so this is the claim at the start and no more; it is infinite
    where the clients' gradients cancel there."""
    initial_gap: float
    """W Theta, Assumption 1.3; H alpha: F(theta_0) - F*."""
    gradient_dissimilarity: float
    """M lambda, Assumption 5, (1/N) sum_i ||grad F_i - grad f||^2 <= lambda^2 for f = (1/N) sum_i F_i: the largest root along
    the pilot."""
    gradient_distance: float
    """The largest distance ||grad F_i - grad f|| of a client along the pilot: a part of H xi^2, Assumption 4."""

    def fedsgd_dpc(self, *, gaussian: bool = False) -> dict[str, object]:
        """Return the keys of a fedsgd-dpc problem that data determine; clip_norm is the pilot's largest gradient norm."""
        keys = self.named("num_clients", "dimension", "strong_convexity", "smoothness", "gradient_bound")
        keys |= self.named("heterogeneity", "initial_distance") | {"num_records": list(self.num_records)}
        if gaussian:
            return keys | {"clip_norm": self.l2_norm, "gradient_variance": list(self.gradient_variance)}
        return keys | {"clip_norm": self.l1_norm}

    def nbafl(self) -> dict[str, object]:
        """Return the keys of a nbafl problem that data determine. `proximal` is a choice: see `nbafl.best_proximal`."""
        keys = self.named("num_clients", "smoothness", "lipschitz", "pl_constant", "dissimilarity", "initial_gap")
        return keys | {"min_records": min(self.num_records)}

    def named(self, *names: str) -> dict[str, object]:
        """Return some constants by name, for a problem that has them as keys."""
        return {name: getattr(self, name) for name in names}


def estimate(clients: Sequence[tuple[ArrayLike, ArrayLike]], *, l2: float, num_classes: int, fit_bias: bool = False) -> Constants:
    """Compute the constants of L2-regularized softmax regression over the clients' data.

    Each client is (features [n_i, f], labels [n_i] of whole numbers in 0..num_classes-1, or one-hot [n_i,
    num_classes]). With `fit_bias` a feature of ones is added. Its weights are regularized too, because the loss would not be
    strongly convex otherwise.

    NOT PRIVATE: the result is a statistic of the clients' data, and no epsilon covers it unless the data are public.

    Raises:
        ValueError: naming the argument that is out of range, or the client whose data have the wrong shape or are not finite.
        RuntimeError: if a fit does not converge.
    """
    checks.number("l2", l2, above=0)
    checks.integer("num_classes", num_classes, at_least=2)
    if not clients:
        raise ValueError("clients=[]: must have at least one client")
    parts = [_part(index, data, l2=l2, num_classes=num_classes, fit_bias=fit_bias) for index, data in enumerate(clients)]
    widths = sorted({part.features.shape[1] for part in parts})
    if len(widths) > 1:
        raise ValueError(f"clients: must all have the same number of features, not {widths}")
    joint = _Part(
        features=np.concatenate([part.features for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        l2=l2,
    )
    start = np.zeros((num_classes, widths[0]))
    own = [_fit(part, start)[-1] for part in parts]
    pilot = _fit(joint, start)
    shares = np.asarray([len(part.features) for part in parts]) / len(joint.features)
    own_losses = np.asarray([part.loss(theta) for part, theta in zip(parts, own, strict=True)])
    joint_loss = joint.loss(pilot[-1])
    # [points of the pilot, clients, statistics]
    norms = np.asarray([[_gradient_statistics(part, theta) for part in parts] for theta in pilot])
    mean_square, largest_l2, largest_l1, of_mean = np.moveaxis(norms, -1, 0)
    distances = np.asarray([_squared_distances(parts, theta) for theta in pilot])
    return Constants(
        num_clients=len(parts),
        num_records=tuple(len(part.features) for part in parts),
        dimension=start.size,
        strong_convexity=l2,
        smoothness=max(_largest_curvature(part.features) for part in parts) / 2 + l2,
        gradient_bound=float(np.sqrt(mean_square.max())),
        gradient_variance=tuple(np.maximum(mean_square - of_mean, 0.0).max(axis=0).tolist()),
        l1_norm=float(largest_l1.max()),
        l2_norm=float(largest_l2.max()),
        heterogeneity=max(float(joint_loss - shares @ own_losses), 0.0),
        initial_distance=float(np.sum((pilot[-1] - start) ** 2)),
        lipschitz=float(np.sqrt(of_mean.max())),
        pl_constant=l2,
        dissimilarity=_dissimilarity(float(shares @ of_mean[0]), joint, start),
        initial_gap=max(joint.loss(start) - joint_loss, 0.0),
        gradient_dissimilarity=float(np.sqrt(distances.mean(axis=1).max())),
        gradient_distance=float(np.sqrt(distances.max())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Records with their loss: features [n, f], one-hot targets [n, k]; parameters are [k, f]."""

    features: Floats
    targets: Floats
    l2: float

    def loss(self, theta: Floats) -> float:
        logits = self.features @ theta.T
        losses = logsumexp(logits, axis=1) - np.sum(self.targets * logits, axis=1)
        return float(np.mean(losses) + self.l2 / 2 * np.sum(theta**2))

    def residuals(self, theta: Floats) -> Floats:
        """Return softmax - target, [n, k]: record j's gradient is the outer product of row j with its features, plus l2 theta."""
        return self.probabilities(theta) - self.targets

    def probabilities(self, theta: Floats) -> Floats:
        logits = self.features @ theta.T
        return np.asarray(np.exp(logits - logsumexp(logits, axis=1, keepdims=True)))

    def gradient(self, theta: Floats) -> Floats:
        return self.residuals(theta).T @ self.features / len(self.features) + self.l2 * theta

    def curvature(self, theta: Floats, direction: Floats) -> Floats:
        """Return the Hessian at theta times a direction."""
        p, moved = self.probabilities(theta), self.features @ direction.T
        inner = p * (moved - np.sum(p * moved, axis=1, keepdims=True))
        return np.asarray(inner.T @ self.features / len(self.features) + self.l2 * direction)


def _part(index: int, data: tuple[ArrayLike, ArrayLike], *, l2: float, num_classes: int, fit_bias: bool) -> _Part:
    name = f"clients[{index}]"
    features = np.asarray(data[0], dtype=np.float64)
    labels = np.asarray(data[1])
    if features.ndim != 2 or not features.size:
        raise ValueError(f"{name}: features must have shape [records, features], not {list(features.shape)}")
    if not np.isfinite(features).all():
        raise ValueError(f"{name}: features must be finite numbers")
    if labels.shape == (len(features), num_classes):
        if not (np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()):
            raise ValueError(f"{name}: one-hot labels must have a single 1 in every row")
        targets = labels.astype(np.float64)
    elif labels.shape == (len(features),):
        if not np.isin(labels, np.arange(num_classes)).all():
            raise ValueError(f"{name}: labels must be whole numbers in 0..{num_classes - 1}")
        targets = np.eye(num_classes)[labels.astype(np.int64)]
    else:
        wanted = f"[{len(features)}] or [{len(features)}, {num_classes}]"
        raise ValueError(f"{name}: labels must have shape {wanted}, not {list(labels.shape)}")
    if fit_bias:
        features = np.hstack([features, np.ones((len(features), 1))])
    return _Part(features=features, targets=targets, l2=l2)


def _fit(part: _Part, start: Floats) -> list[Floats]:
    """Return the iterates of the fit, from the start to the optimum."""
    shape, path = start.shape, [start]

    scale = _gradient_scale(part, start)
    if scale == 0:
        return path
    result: Any = minimize(
        lambda vector: part.loss(vector.reshape(shape)),
        start.ravel(),
        jac=lambda vector: part.gradient(vector.reshape(shape)).ravel(),
        hessp=lambda vector, way: part.curvature(vector.reshape(shape), way.reshape(shape)).ravel(),
        method="trust-ncg",
        callback=lambda vector: path.append(vector.reshape(shape).copy()),
        options={"gtol": _TOLERANCE * scale, "maxiter": 1000},
    )
    last = np.asarray(result.x).reshape(shape)
    if np.linalg.norm(part.gradient(last)) > _WORST * scale:
        raise RuntimeError(f"the fit did not converge ({result.message}); try a larger l2 than {part.l2:g}")
    return [*path, last]


def _gradient_statistics(part: _Part, theta: Floats) -> tuple[float, float, float, float]:
    """Return the per-record gradients' mean squared L2 norm, largest L2 and L1 norm, and their mean's squared L2 norm."""
    residuals = part.residuals(theta)
    crossed = np.sum(residuals * (part.features @ theta.T), axis=1)
    squares = np.sum(part.features**2, axis=1) * np.sum(residuals**2, axis=1)
    squares = np.maximum(squares + 2 * part.l2 * crossed + part.l2**2 * np.sum(theta**2), 0.0)
    sums = np.sum(np.abs(part.features), axis=1) * np.sum(np.abs(residuals), axis=1) + part.l2 * np.sum(np.abs(theta))
    mean = np.sum(part.gradient(theta) ** 2)
    return float(squares.mean()), float(np.sqrt(squares.max())), float(sums.max()), float(mean)


def _squared_distances(parts: Sequence[_Part], theta: Floats) -> Floats:
    """Return the squared distance of each client's gradient from the unweighted mean of the clients' gradients."""
    gradients = np.asarray([part.gradient(theta).ravel() for part in parts])
    return np.asarray(np.sum((gradients - gradients.mean(axis=0)) ** 2, axis=1))


def _gradient_scale(part: _Part, theta: Floats) -> float:
    """Return the root mean square of the per-record gradients' L2 norms."""
    return math.sqrt(_gradient_statistics(part, theta)[0])


def _dissimilarity(mean_square: float, joint: _Part, start: Floats) -> float:
    """Return B at the start: infinity if the clients' gradients cancel, 1 if they vanish."""
    norm = float(np.linalg.norm(joint.gradient(start)))
    if norm <= _TOLERANCE * _gradient_scale(joint, start):
        return 1.0 if mean_square <= norm**2 else math.inf
    return max(math.sqrt(mean_square) / norm, 1.0)


def _largest_curvature(features: Floats) -> float:
    """Return lambda_max(X^T X / n), from the smaller of the two Gram matrices."""
    gram = features.T @ features if features.shape[0] > features.shape[1] else features @ features.T
    return float(np.linalg.eigvalsh(gram)[-1]) / len(features)
