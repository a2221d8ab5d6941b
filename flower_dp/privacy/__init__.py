"""The privacy cost of releases: events, accounting, ledgers, statements."""
