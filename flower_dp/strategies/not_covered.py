"""What no statement covers, and what none may keep quiet about, in the same words for all methods."""

from flower_dp.strategies.run_state import RunFacts

OTHER_RUNS = "other runs on the same records: this statement is of one run, and the budgets of several runs add up"
CHANGING_NAMES = (
    "NAMES CHANGE: clients are named by the ids of their nodes, which change when a node starts anew: other runs count one "
    "client as several, and what they cost it together is not known"
)
# Of methods whose clients keep an account.
ACCOUNTS = "; a device that keeps a ledger file (docs/deployment.md) counts all of them, which this statement can't know"


def not_covered(run: RunFacts, *, accounts: bool, logs: str, evaluations: str | None) -> tuple[str, ...]:
    """Return what a statement does not cover.

    Args:
        run: facts of the run.
        accounts: whether clients keep accounts of their replies; the others clip whole updates.
        logs: where logs could tell something of client data, in words.
        evaluations: the private evaluations that are covered, in words; None without any planned.
    """
    lines = [
        OTHER_RUNS + (ACCOUNTS if accounts else ""),
        f"everything else that is computed from client data: choice of settings, timing, {logs}",
    ]
    if run.report_client_metrics:
        lines.append("CLIENT METRICS: clients sent training metrics without noise")
        if not accounts:
            lines.append(
                "CLIENT METRICS: the norms of clients' updates before the clip are among them, and may tell how many took part"
            )
    if run.changing_names:
        lines.append(CHANGING_NAMES)
    if evaluations is not None:
        lines.append(f"which metrics are evaluated, and their bounds, are taken as public: {evaluations} are covered")
    if run.custom_evaluation:
        lines.append("CLIENT METRICS: the strategy's own configure_evaluate asks clients for metrics without noise")
    return tuple(lines)


def seeded(run: RunFacts) -> tuple[str, ...]:
    """Return that noise is not secret, if so."""
    return ("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only",) if run.seeded_noise else ()
