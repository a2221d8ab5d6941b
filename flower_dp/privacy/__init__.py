"""What a release costs, and how that is told: events, accounting, ledgers, statements."""
