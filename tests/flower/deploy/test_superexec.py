"""What Flower's SuperExec starts shows its token to nobody."""

import subprocess
import sys

import pytest

from feddure.flower.deploy.superexec import start_hiding_token


@pytest.mark.skipif(sys.platform == "win32", reason="no open files are inherited there")
def test_the_token_is_no_argument_and_arrives_through_a_shell():
    """As at a site, where a script stands in front of Flower's program."""
    program = (
        "from types import SimpleNamespace as N; import sys; from flwr.common.args import try_obtain_flwr_app_token;"
        "print(sys.argv[1:], try_obtain_flwr_app_token(N(token_file=sys.argv[2])))"
    )
    script = f'exec "$PYTHON" -c "{program}" "$@"'
    command = ["sh", "-c", script, "sh", "--token", "secret", "--insecure"]
    started = start_hiding_token(command, stdout=subprocess.PIPE, text=True, env={"PYTHON": sys.executable})
    arguments, _, token = started.communicate()[0].strip().rpartition(" ")
    assert token == "secret"
    assert "secret" not in arguments
    assert arguments.startswith("['--token-file', ")
    assert arguments.endswith("'--insecure']")
