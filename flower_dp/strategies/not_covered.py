"""Texts of the statements of all methods: what is not covered, and what makes a run not private."""

from flower_dp.strategies.run_state import RunFacts

OTHER_RUNS = "Other runs on the same records. The guarantee's epsilon does not cover them; the costs of several runs add up."
CHANGING_NAMES = (
    "NAMES CHANGE: clients are named by the ids of their nodes, and a node that restarts has a new id. Other runs count one "
    "client as several, so the joint cost of the runs to that client is not known."
)
# Of methods whose clients keep an account.
ACCOUNTS = " A device that keeps a ledger file counts all of them; this statement does not know that count."


def not_covered(run: RunFacts, *, accounts: bool, logs: str, evaluations: str | None) -> tuple[str, ...]:
    """Return what a statement does not cover.

    Args:
        run: facts of the run.
        accounts: whether clients keep accounts of their replies; the others clip whole updates.
        logs: text that names the logs that could reveal client data.
        evaluations: text that names the covered private evaluations; None without any planned.
    """
    lines = [
        OTHER_RUNS + (ACCOUNTS if accounts else ""),
        f"Everything else computed from client data: the choice of settings, timing, {logs}.",
    ]
    if run.report_client_metrics:
        lines.append("CLIENT METRICS: clients sent training metrics without noise.")
        if not accounts:
            lines.append(
                "CLIENT METRICS: they include the norms of clients' updates before the clip, which may reveal how many took part."
            )
    if run.changing_names:
        lines.append(CHANGING_NAMES)
    if evaluations is not None:
        lines.append(
            f"The choice of the evaluated metrics and their bounds, which are assumed public: {evaluations} are covered."
        )
    if run.custom_evaluation:
        lines.append("CLIENT METRICS: the strategy's own configure_evaluate requests metrics without noise.")
    return tuple(lines)


def seeded(run: RunFacts) -> tuple[str, ...]:
    """Return a warning if the noise came from a fixed seed."""
    return ("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only.",) if run.seeded_noise else ()
