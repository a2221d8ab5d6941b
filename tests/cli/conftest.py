"""What tests of the command share."""

import pytest

from flower_dp.cli import main as cli


@pytest.fixture
def call(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        # The workers of another test's simulation, which stay in this process, may log at any time.
        err = "".join(line for line in err.splitlines(keepends=True) if " pid=" not in line)
        return ended.value.code, out, err

    return run
